"""Join steps with the losses that their ranks reported.

A step is closed once the spans of its ranks have arrived. Its loss is on a state page, which agents
read less often. So a closed step waits up to a second for its loss before it is displayed
(detectors get it immediately).
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from paceline_server.steps.types import StepSummary
from paceline_wire.ring import StateView

# Twice the interval at which agents read state pages.
PATIENCE_NS = 1_000_000_000
REPORTED_STEPS = 256  # kept losses of steps that are not closed yet


class LossJoin:
    """Joins state pages (`add_state`) with closed steps (`add`).

    `take` returns the complete ones.
    """

    def __init__(self) -> None:
        self._reported: dict[int, tuple[float | None, float | None]] = {}
        self._newest: int | None = None
        self._waiting: deque[tuple[int, StepSummary]] = deque()

    def add_state(self, view: StateView) -> None:
        step = view.loss_step
        if step is None:
            return
        self._newest = step if self._newest is None else max(self._newest, step)
        # The first report is used, because usually all ranks report the mean over the job.
        self._reported.setdefault(step, (_finite(view.loss), _finite(view.gradient_norm)))
        if len(self._reported) > REPORTED_STEPS:
            del self._reported[min(self._reported)]

    def add(self, summary: StepSummary, now_ns: int) -> None:
        self._waiting.append((now_ns, summary))

    def take(self, now_ns: int | None) -> list[StepSummary]:
        """Return complete steps in order; all if `now_ns` is None (the generation is over)."""
        complete = []
        while self._waiting:
            since_ns, summary = self._waiting[0]
            # A job that has not reported any loss does not wait.
            is_reported = self._newest is None or self._newest >= summary.step
            if now_ns is not None and not is_reported and now_ns - since_ns < PATIENCE_NS:
                break
            self._waiting.popleft()
            # A step that stands for others has the newest loss of theirs.
            steps = range(summary.step, summary.step - summary.skipped - 1, -1)
            reported = next((step for step in steps if step in self._reported), summary.step)
            loss, norm = self._reported.pop(reported, (None, None))
            complete.append(msgspec.structs.replace(summary, loss=loss, gradient_norm=norm))
        return complete


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinity: JSON has neither, and a finding reports them."""
    return value if value is not None and math.isfinite(value) else None
