"""Thresholds of the checkpoint stall detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointStallSettings:
    """How long a checkpoint must block training."""

    # A checkpoint is slow when it takes this many times what other ranks or earlier ones take ...
    ratio: float = 2.0
    # ... and this share of a step longer: less has no effect that people notice.
    step_share: float = 0.3
    # Share of all time at which blocking for checkpoints is worth advice: saving asynchronously
    # wins about half of it back.
    cost_ratio: float = 0.08


DEFAULTS = CheckpointStallSettings()
