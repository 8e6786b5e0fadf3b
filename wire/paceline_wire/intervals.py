"""The interval between two checkpoints that costs least (Young 1974; Daly 2006).

With a cost w of a checkpoint and a mean time M between failures, an interval t of training costs
w / (t + w) + (t + w) / (2 M) of the time. The best one is sqrt(2 w M) - w, at most M.
"""

from __future__ import annotations

import math


def best_interval_seconds(cost: float, mttf: float) -> float:
    """Return the interval that costs least. Args are seconds."""
    return math.sqrt(2.0 * cost * mttf) - cost if cost < mttf / 2.0 else mttf
