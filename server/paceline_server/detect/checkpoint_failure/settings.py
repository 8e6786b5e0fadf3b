"""Thresholds of the checkpoint failure detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointFailureSettings:
    """Thresholds: when missing checkpoints are reported."""

    # Failures in a row that are critical. One failure can be storage that was briefly busy; after
    # three, a crash costs at least three intervals.
    critical_failures: int = 3
    # Number of intervals needed to know the usual interval between checkpoints.
    known_intervals: int = 2
    # A checkpoint is missing after this many usual intervals. A save in the background may be late
    # by one interval.
    missing_intervals: float = 3.0


DEFAULTS = CheckpointFailureSettings()
