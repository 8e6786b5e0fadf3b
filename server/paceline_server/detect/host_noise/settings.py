"""Thresholds of the host noise detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostNoiseSettings:
    """Thresholds: how slow, how irregular and how busy a node must be."""

    # A step is noisy if all ranks of the node are slower than usual by this factor.
    slowdown: float = 1.08
    # Enough steps of the window must be noisy, in several periods, but not nearly all: if a node is
    # slow in every step, the cause is the node itself and not occasional load.
    window_steps: int = 24
    least_share: float = 0.15
    most_share: float = 0.75
    stretches: int = 3
    # The host's own metrics must confirm it: tasks waited for a CPU for this share of the time, and
    # this many times longer than on other nodes.
    pressure: float = 0.15
    ratio: float = 2.0
    # Share of step time from which the severity is warning instead of info.
    warning_cost_ratio: float = 0.05


DEFAULTS = HostNoiseSettings()
