"""Thresholds of the slow evaluation detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlowEvaluationSettings:
    """Thresholds: how much longer a rank must evaluate than the others."""

    # Shards of different lengths differ by less than this.
    ratio: float = 1.5
    # A shorter difference is noise of busy CPUs.
    least_seconds: float = 0.25
    evaluations: int = 2  # number of evaluations that must agree
    # Ranks with equal shards differ by this from one evaluation to the next (a logarithm). It
    # counts like so many measured differences.
    usual_variation: float = 0.1
    known_evaluations: int = 4
    chance: float = 1e-3  # that variation explains it, over all ranks


DEFAULTS = SlowEvaluationSettings()
