"""The offset between the clock of the spans (CLOCK_MONOTONIC) and the agent's timeline."""

from __future__ import annotations

import time

from paceline_agent.clock import timeline_ns

_TOLERANCE_NS = 200_000  # a larger change is a suspension, not a scheduling delay


class ClockOffset:
    """The agent's timeline minus CLOCK_MONOTONIC: constant until the machine is suspended.

    Both clocks are slewed alike and cannot be set. Single readings vary only because this process
    may be descheduled in between.
    """

    def __init__(self) -> None:
        self._offset_ns = _measure()

    def read_ns(self) -> int:
        """Return the offset."""
        measured = _measure()
        if abs(measured - self._offset_ns) > _TOLERANCE_NS:
            self._offset_ns = measured
        return self._offset_ns


def _measure() -> int:
    """Return the offset from the tightest of three readings."""
    readings = []
    for _ in range(3):
        before = time.monotonic_ns()
        realtime = timeline_ns()
        after = time.monotonic_ns()
        readings.append((after - before, realtime - (before + after) // 2))
    return min(readings)[1]
