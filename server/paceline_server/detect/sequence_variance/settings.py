"""Thresholds of the sequence variance detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceVarianceSettings:
    """How often sequence lengths are analyzed, and what they must cost."""

    steps: int = 8  # between two analyses: data hardly change from one step to the next
    first_steps: int = 3  # before the first analysis
    # Share of step time that equal microbatches must save: packing differently is work.
    cost_ratio: float = 0.05
    # Share of the variance of compute times that lengths must explain; else the cause is another.
    explained: float = 0.3


DEFAULTS = SequenceVarianceSettings()
