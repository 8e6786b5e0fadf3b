"""Thresholds of the checkpoint stall detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointStallSettings:
    """Thresholds: how long a checkpoint must block training."""

    # A checkpoint is slow when it takes this many times as long as on other ranks or earlier ...
    ratio: float = 2.0
    # ... and is longer by this share of a step, and by this time: less is not noticeable, and busy
    # CPUs delay the copy of a small state by as much.
    step_share: float = 0.3
    least_seconds: float = 0.25
    # Share of all time at which blocking for checkpoints is worth advice: saving asynchronously
    # recovers about half of it.
    cost_ratio: float = 0.08


DEFAULTS = CheckpointStallSettings()
