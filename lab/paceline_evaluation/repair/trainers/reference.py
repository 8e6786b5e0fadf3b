"""The reference trainer, which fails on order."""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Iterator
from typing import Any

import orders

import paceline

_steps = paceline.steps


def _obedient(loader: Iterable[Any], *, start: int | None = None) -> Iterator[Any]:
    for completed, batch in enumerate(_steps(loader, start=start), start or 0):
        if orders.before(completed):
            return
        yield batch
        orders.after(completed + 1)


if __name__ == "__main__":
    paceline.steps = _obedient  # type: ignore[assignment]
    runpy.run_module("paceline_trainer", run_name="__main__", alter_sys=True)
