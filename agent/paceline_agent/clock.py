"""The agent's clocks; a test passes its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

# Counts suspended time too, if the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def timeline_ns() -> int:
    """Return the time on the agent's timeline: CLOCK_REALTIME at its start, plus elapsed time.

    Setting the node's clock later neither reorders nor repeats measurements: within a boot, no
    timestamp of the agent goes back. The offsets of the server's clock and of CLOCK_REALTIME from
    the timeline are metrics; the server corrects by its own estimate.
    """
    return _REALTIME_MINUS_CLOCK_NS + time.clock_gettime_ns(_CLOCK)


def stepped_ns() -> int:
    """Return by how much CLOCK_REALTIME was set since the agent started."""
    return time.time_ns() - timeline_ns()


_REALTIME_MINUS_CLOCK_NS = time.time_ns() - time.clock_gettime_ns(_CLOCK)


class Clock(Protocol):
    """Time and timers."""

    def realtime_ns(self) -> int:
        """Return the time on the agent's timeline."""

    def monotonic_seconds(self) -> float:
        """Return seconds of a clock that never goes back; only differences have a meaning."""

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        """Call back in the running loop after a pause."""


# (shortest pause, tick): a pause of at least the former ends on a multiple of the latter.
_TICKS = ((0.75, 1.0), (0.25, 0.125))


def until_next(period_seconds: float, phase_seconds: float = 0.0) -> float:
    """Return the seconds until the next multiple of a period since the machine started."""
    return period_seconds - (time.monotonic() - phase_seconds) % period_seconds


class SystemClock:
    """The machine's clocks.

    A longer pause ends at the nearest tick, so that timers due at about the same time wake the
    process once. A wake-up costs as much as many collectors, and values read together are
    comparable.
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
