"""Thresholds of the sequence variance detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceVarianceSettings:
    """Thresholds: how often sequence lengths are analyzed, and the cost that is reported."""

    steps: int = 8  # steps between two analyses: data rarely changes from one step to the next
    first_steps: int = 3  # steps before the first analysis
    # Share of step time that equal microbatches must save, because changing the packing takes
    # effort.
    cost_ratio: float = 0.05
    # Share of the variance of compute times that lengths must explain; otherwise the cause is
    # another one.
    explained: float = 0.3


DEFAULTS = SequenceVarianceSettings()
