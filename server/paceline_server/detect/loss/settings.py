"""Thresholds of the detector of spikes and divergence of the loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossSettings:
    """See `LossDetector`."""

    window: int = 64  # losses of a rank that the next one is compared with
    least: int = 16  # number of losses that are needed for a comparison
    # The first losses of a training fall steeply, and those after a resume may rise for a moment.
    warmup: int = 4
    # A heavy tail is usual: batches differ. Ten deviations never occurred in healthy runs.
    least_ratio: float = 0.02  # smallest rise over the median, in relation to it
    # Close to zero, as of a model that knows its data by heart, a loss varies by powers of ten.
    least_of_highest: float = 1e-3  # smallest rise, in relation to the highest usual loss
    least_rise: float = 1e-6
    ranks: int = 64  # compared ones: more would not change a majority


DEFAULTS = LossSettings()
