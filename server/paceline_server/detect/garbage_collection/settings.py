"""Thresholds of the garbage collection detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GarbageCollectionSettings:
    """Minimum cost of pauses for garbage collection, and the number of steps they must occur in."""

    # Share of step time that the pauses must cost beyond what they would cost if all ranks paused
    # together. A healthy job of a thousand ranks, each of which occasionally pauses for a hundredth
    # of a step, loses 1 to 1.5% this way.
    share: float = 0.025
    window_steps: int = 48
    pauses: int = 5  # steps with such a pause: a few could be coincidence ...
    # ... unless the cost of this many steps is a multiple of the share.
    fewest_pauses: int = 3
    recent_steps: int = 8
    obvious_ratio: float = 2.5
    # Without such pauses for this long, the finding is cleared: 48 short steps may be between two.
    calm_seconds: float = 30.0
    # Share of step time from which pauses that all ranks take together, as advised, are reported.
    together_share: float = 0.1


DEFAULTS = GarbageCollectionSettings()
