"""How the clock of the spans lies to that of everything else."""

from __future__ import annotations

import time

from paceline_agent.clock import timeline_ns

_TOLERANCE_NS = 200_000


class ClockOffset:
    """The agent's timeline - CLOCK_MONOTONIC, held still until the machine was suspended.

    Both clocks are slewed alike, and nobody can set them; what a single reading varies by is our
    own scheduling.
    """

    def __init__(self) -> None:
        self._offset_ns = _measure()

    def read_ns(self) -> int:
        measured = _measure()
        if abs(measured - self._offset_ns) > _TOLERANCE_NS:
            self._offset_ns = measured
        return self._offset_ns


def _measure() -> int:
    """The tightest of a few readings."""
    readings = []
    for _ in range(3):
        before = time.monotonic_ns()
        realtime = timeline_ns()
        after = time.monotonic_ns()
        readings.append((after - before, realtime - (before + after) // 2))
    return min(readings)[1]
