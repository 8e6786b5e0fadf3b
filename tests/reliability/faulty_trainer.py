"""The reference trainer, which fails on command.

Before each step a rank reads `orders/RANK` in the directory of the checkpoints. An order is
executed once, except `poison`, which makes the same step fail in every generation.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import paceline

_steps = paceline.steps


def _obedient(loader: Iterable[Any], *, start: int | None = None) -> Iterator[Any]:
    orders = Path(os.environ["PACELINE_CHECKPOINT_DIRECTORY"], "orders", os.environ["RANK"])
    for step, batch in enumerate(_steps(loader, start=start), start or 0):
        if orders.exists():
            _obey(orders, step)
        yield batch


def _obey(path: Path, step: int) -> None:
    order = json.loads(path.read_text())
    if order["kind"] == "poison":
        if step >= order["step"]:
            raise ValueError(f"the sample of step {order['step']} cannot be decoded")
        return
    path.unlink()
    if order["kind"] == "exit":
        sys.exit(order["status"])
    if order["kind"] == "exception":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    if order["kind"] == "out-of-device-memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if order["kind"] == "out-of-memory":
        _use_memory(Path(order["cgroup"]), order["bytes"])
    raise AssertionError(order)


def _use_memory(cgroup: Path, limit: int) -> None:
    """Join a control group and exceed its limit, so that the kernel kills this process."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while len(held) * (1 << 24) < 4 * limit:
        held.append(bytearray(b"x") * (1 << 24))
    raise AssertionError("the control group has no limit")


if __name__ == "__main__":
    paceline.steps = _obedient  # type: ignore[assignment]
    runpy.run_module("paceline_trainer", run_name="__main__", alter_sys=True)
