"""The price of a restart: the training that it would repeat."""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline_server.decide.checkpoints import STOP_SECONDS, expected_checkpoint
from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.types import JobView
from paceline_server.decide.wording import steps_text, time_text


class Price(NamedTuple):
    """Steps that a restart repeats, and about how long they take."""

    steps: int
    seconds: float | None  # None: no step time is known


def price_of(view: JobView, progress: ActionProgress) -> Price:
    """Return the price now.

    A restart that begins with a checkpoint on command repeats nothing. One that waits for the
    script's own repeats the steps between the checkpoint and the stop.
    """
    newest = view.current_step
    if newest is not None and progress.roll_back_onset is not None:
        steps = max(0, newest + 1 - progress.roll_back_onset)
        return Price(steps, None if view.step_seconds is None else steps * view.step_seconds)
    if newest is None or (progress.planned and not progress.waits):
        return Price(0, 0.0)
    if progress.waits:
        steps = view.experience.checkpoint_saving_steps + 1
        steps += math.ceil(STOP_SECONDS / view.step_seconds) if view.step_seconds else 0
    else:
        steps = max(0, newest + 1 - (view.checkpoint_step or 0))
    return Price(steps, None if view.step_seconds is None else steps * view.step_seconds)


def price_text(price: Price, view: JobView, progress: ActionProgress) -> str:
    """Return a sentence such as `Price: 173 steps (8.7 min) since the checkpoint of step 40.`"""
    if not price.steps:
        return "Price: no step is repeated."
    time = "" if price.seconds is None else f" ({time_text(price.seconds)})"
    if progress.waits:
        expected = expected_checkpoint(view)
        when = "" if expected is None else f", {expected.text()}"
        return f"Price: about {steps_text(price.steps)}{time} after that checkpoint{when}."
    if progress.roll_back_onset is not None:
        return (
            f"Price: {steps_text(price.steps)}{time} since step {progress.roll_back_onset}, and "
            "those between the checkpoint and that step."
        )
    since = (
        f"since the checkpoint of step {view.checkpoint_step}"
        if view.checkpoint_step
        else "since the start: no checkpoint is known"
    )
    return f"Price: {steps_text(price.steps)}{time} {since}."
