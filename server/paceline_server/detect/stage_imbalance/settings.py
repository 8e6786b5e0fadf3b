"""Thresholds of the stage imbalance detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageImbalanceSettings:
    """Thresholds: how uneven stages must be, and in how many steps."""

    # Time of the longest stage over the mean of all stages. The loss on the last stage and chips
    # that differ by a percent or two result in 1.05.
    ratio: float = 1.06
    # Speedup that even stages must bring, because dividing the model again takes effort.
    least_gain: float = 1.06
    steps: int = 12  # the first steps, which show how the model was divided ...
    fewest_steps: int = 3  # ... or this many that clearly agree:
    # the excess is this many standard errors of its variation from step to step.
    significance: float = 5.0


DEFAULTS = StageImbalanceSettings()
