"""Thresholds of the slow data detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import BASELINE_STEPS


@dataclass(frozen=True, slots=True)
class SlowDataSettings:
    """How long, how often and against what a rank must wait for its data."""

    # Steps of a rank's own past that are needed to judge it by them alone.
    baseline_steps: int = BASELINE_STEPS
    # A step is slow when the wait exceeds the normal one by this share of the step: a stall that
    # makes steps a tenth longer is 9% of them, and the jitter of the wait itself is far less ...
    share: float = 0.06
    # ... and is this many times what the peers wait and what the rank waited before.
    ratio: float = 3.0
    # So many of the last steps must be slow: the end of an epoch or a cold cache is shorter.
    window_steps: int = 5
    hits: int = 4
    # A wait that comes and goes (every n-th file is on a slow disk) must come this often in so
    # many steps, and cost this share of all of them: every storage has rare long reads.
    recurring_window_steps: int = 32
    recurring_hits: int = 4
    recurring_share: float = 0.03


DEFAULTS = SlowDataSettings()
