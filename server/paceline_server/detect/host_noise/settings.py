"""Thresholds of the host noise detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostNoiseSettings:
    """How slow, how irregular and how busy a node must be."""

    # A step is noisy when all ranks of the node are this much slower than usual.
    slowdown: float = 1.08
    # Enough steps of the window must be noisy, in several stretches, but not nearly all: what
    # slows a node in every step is the node itself, not something that runs there now and then.
    window_steps: int = 24
    least_share: float = 0.15
    most_share: float = 0.75
    stretches: int = 3
    # The host's own metrics must confirm it: tasks waited for a CPU for this share of the time,
    # and for this many times what other nodes measure.
    pressure: float = 0.15
    ratio: float = 2.0
    # Share of step time from which it is worth a warning rather than a note.
    warning_cost_ratio: float = 0.05


DEFAULTS = HostNoiseSettings()
