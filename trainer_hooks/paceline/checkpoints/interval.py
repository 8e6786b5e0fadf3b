"""When a script saves that leaves this to Paceline.

It is every 10 minutes. If the policy of the job says `checkpoint_interval = "advised"`, the server
passes the job's mean time between failures in the environment:

    PACELINE_MTTF_SECONDS=115608

Then it is the interval that costs least with what this job's checkpoints have cost so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from paceline_wire.intervals import best_interval_seconds

DEFAULT_SECONDS = 600.0
# Failures are not the only reason why work is lost, and a checkpoint also loads the storage.
LEAST_SECONDS = 60.0
MOST_SECONDS = 3600.0
MTTF = "PACELINE_MTTF_SECONDS"
_COSTS_KEPT = 4


class CheckpointInterval:
    """The interval of one rank, which saves for all."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mttf_seconds = mttf_of(environment)
        self._costs: deque[float] = deque(maxlen=_COSTS_KEPT)

    def saved(self, seconds: float) -> None:
        """Note how long a checkpoint blocked the training."""
        self._costs.append(seconds)

    def seconds(self) -> float:
        """Return the time from one checkpoint to the next."""
        if self._mttf_seconds is None or not self._costs:
            return DEFAULT_SECONDS
        best = best_interval_seconds(median(self._costs), self._mttf_seconds)
        return min(max(best, LEAST_SECONDS), MOST_SECONDS)


def mttf_of(environment: Mapping[str, str]) -> float | None:
    """Return the mean time between failures; None if it is not given, or no such time."""
    try:
        seconds = float(environment.get(MTTF, ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0.0 else None
