"""The clocks the agent goes by; a test brings its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # counts on while suspended


def timeline_ns() -> int:
    """CLOCK_REALTIME as it was when this agent began, plus what has passed since.

    Whoever sets the node's clock meanwhile neither reorders nor repeats what was measured: nothing
    an agent says of one boot goes back. How far the timeline is from the server's clock, and
    CLOCK_REALTIME from the timeline, are metrics; the server corrects by its own estimate.
    """
    return _REALTIME_MINUS_CLOCK_NS + time.clock_gettime_ns(_CLOCK)


def stepped_ns() -> int:
    """How far CLOCK_REALTIME was set since the agent began."""
    return time.time_ns() - timeline_ns()


_REALTIME_MINUS_CLOCK_NS = time.time_ns() - time.clock_gettime_ns(_CLOCK)


class Clock(Protocol):
    def realtime_ns(self) -> int:
        """CLOCK_REALTIME of the node, or what stands for it."""

    def monotonic_seconds(self) -> float: ...

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        """In the running loop."""


_TICKS = ((0.75, 1.0), (0.25, 0.125))  # of pauses from so long on: their ends fall on multiples


def until_next(period_seconds: float, phase_seconds: float = 0.0) -> float:
    """Seconds until the next multiple of a period, counted from when the machine started."""
    return period_seconds - (time.monotonic() - phase_seconds) % period_seconds


class SystemClock:
    """The machine's own clocks.

    A longer pause ends at the nearest tick. What is due at about the same time then wakes the
    process once: each wake-up costs as much as many a collector, and what was read together
    belongs together.
    """

    def realtime_ns(self) -> int:
        return timeline_ns()

    def monotonic_seconds(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        now = time.monotonic()
        for least_seconds, tick_seconds in _TICKS:
            if seconds >= least_seconds:
                seconds = round((now + seconds) / tick_seconds) * tick_seconds - now
                break
        return asyncio.get_running_loop().call_later(seconds, callback)
