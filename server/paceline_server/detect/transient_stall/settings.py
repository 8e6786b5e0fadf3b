"""Thresholds of the transient stall detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import BASELINE_STEPS


@dataclass(frozen=True, slots=True)
class TransientStallSettings:
    """Thresholds: how large a stall must be to be reported."""

    baseline_steps: int = BASELINE_STEPS
    # Share of a step that a stall must take ...
    share: float = 0.2
    # ... its length (a busy host delays any process by some time slices of its scheduler) ...
    least_seconds: float = 0.02
    # ... and how many times the worst of the earlier steps it must be: step times have heavy tails.
    over_worst: float = 1.25
    # Stalls of this length cost something, and come with advice.
    notable_seconds: float = 1.0
    # The finding is cleared after this many steps without another stall, long enough for a person
    # to see it.
    reported_steps: int = 50
    # When more than this share of the ranks stall at once, they share the cause.
    most_ranks_share: float = 0.25


DEFAULTS = TransientStallSettings()
