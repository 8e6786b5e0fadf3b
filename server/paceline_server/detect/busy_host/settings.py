"""Thresholds of the busy host detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BusyHostSettings:
    """Thresholds: how long the median rank must wait for a CPU."""

    # Share of time from which a rank that is a fifth slower is within the noise ...
    share: float = 0.17
    # ... and below which it is over.
    over: float = 0.1
    lasting_seconds: float = 5.0
    check_seconds: float = 1.0
    # How long a report holds at least; waits and scatter vary from one moment to the next.
    renewal_seconds: float = 60.0


DEFAULTS = BusyHostSettings()
