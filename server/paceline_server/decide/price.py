"""The price of a restart: the training that it would repeat."""

from __future__ import annotations

from typing import NamedTuple

from paceline_server.decide.types import JobView


class Price(NamedTuple):
    """Steps that a restart without a new checkpoint repeats, and about how long they take."""

    steps: int
    seconds: float | None  # None: no step time is known


def price_of(view: JobView, *, saves: bool) -> Price:
    """Return the price now. `saves`: the restart begins with a checkpoint, and repeats nothing."""
    if saves or view.highest_step is None:
        return Price(0, 0.0)
    steps = max(0, view.highest_step + 1 - (view.checkpoint_step or 0))
    return Price(steps, None if view.step_seconds is None else steps * view.step_seconds)


def price_text(price: Price, view: JobView) -> str:
    """Return a sentence such as `Price: 173 steps (8.7 min) since the checkpoint of step 40.`"""
    if not price.steps:
        return "Price: no step is repeated."
    steps = "1 step" if price.steps == 1 else f"{price.steps:,} steps"
    time = "" if price.seconds is None else f" ({_duration(price.seconds)})"
    since = (
        f"since the checkpoint of step {view.checkpoint_step}"
        if view.checkpoint_step
        else "since the start: no checkpoint is known"
    )
    return f"Price: {steps}{time} {since}."


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
