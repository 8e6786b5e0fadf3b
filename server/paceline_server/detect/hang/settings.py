"""Thresholds of the hang detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HangSettings:
    """How surely a rank must be blocked. `Policy` says for how long."""

    # Multiple of the usual (p99) duration of the operation, or of the step.
    step_multiple: float = 3.0
    # The agent itself must have seen the same state page for this long, whatever times the page
    # contains: four reads.
    observed_seconds: float = 1.5
    # Certain when the process is stopped or gone: half of the policy's limit is enough.
    confirmed_seconds: float = 1.5
    # A page that was received longer ago says nothing about now: delivery hangs, not training.
    freshness_seconds: float = 2.5
    # Steps that must be known before their p99 means anything.
    known_steps: int = 3


DEFAULTS = HangSettings()
