"""The orders for a training, and the log of its steps.

The directory ORDERS, shared by all ranks, has

    order.RANK   an order (JSON) that the rank executes once, before its next step; `poison` makes
                 the same step fail in every generation
    end          number of steps after which all ranks end their training
    steps.RANK   written by the rank: a line per finished step with its pid, the number of completed
                 steps and CLOCK_MONOTONIC in nanoseconds
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

_directory = Path(os.environ.get("ORDERS", "."))
_rank = os.environ.get("RANK", "0")
_order = _directory / f"order.{_rank}"
_end = _directory / "end"
_log = (_directory / f"steps.{_rank}").open("a", buffering=1)
_last: list[int] = []  # number of steps after which to end, once it is ordered
_pause_seconds = float(os.environ.get("STEP_SECONDS", "0.05"))


def before(completed: int) -> bool:
    """Execute an order before the next step. Return whether the training is to end instead."""
    if _order.exists():
        _obey(json.loads(_order.read_text()), completed)
    if not _last and _end.exists():
        _last.append(int(_end.read_text()))
    return bool(_last) and completed >= _last[0]


def after(completed: int) -> None:
    """Log a finished step; the pause takes the place of an accelerator's work."""
    _log.write(f"{os.getpid()} {completed} {time.monotonic_ns()}\n")
    time.sleep(_pause_seconds)


def _obey(order: dict[str, object], completed: int) -> None:
    if order["kind"] == "poison":
        if completed >= int(str(order["step"])):
            raise ValueError(f"the sample of step {order['step']} cannot be decoded")
        return
    _order.unlink()
    if order["kind"] == "exit":
        sys.exit(int(str(order["status"])))
    if order["kind"] == "exception":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    if order["kind"] == "out-of-device-memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if order["kind"] == "out-of-memory":
        _use_memory(int(str(order["bytes"])))
    raise AssertionError(order)


def _use_memory(most: int) -> None:
    """Exceed the limit of the process's control group, so that the kernel kills it."""
    held = []
    while len(held) * (1 << 24) < most:
        held.append(bytearray(b"x") * (1 << 24))
    raise AssertionError("the control group has no limit")
