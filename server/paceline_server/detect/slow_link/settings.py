"""Thresholds of the slow link detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import FALSE_ALARMS_PER_STEP


@dataclass(frozen=True, slots=True)
class SlowLinkSettings:
    """Minimum cost of slower transfers. `Policy` defines how much slower they must be."""

    false_alarms_per_step: float = FALSE_ALARMS_PER_STEP
    # Share of step time that the slower transfers must cost. Transfers are short and their jitter
    # is large: a smaller cost is often only jitter.
    cost_ratio: float = 0.02
    # Cost from which the severity is warning instead of info.
    warning_cost_ratio: float = 0.05
    # On a busy host what TCP delivers more slowly must last this long: for some seconds the kernel
    # has no CPU for it either.
    contention_seconds: float = 10.0


DEFAULTS = SlowLinkSettings()
