"""Thresholds of the routing imbalance detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingImbalanceSettings:
    """Thresholds: how often routing is analyzed, and the cost that is reported."""

    steps: int = 16  # steps that are analyzed together: routing varies from one step to the next
    # Share of step time that even routing must save: changing a router takes effort.
    cost_ratio: float = 0.05
    # Routing that was even for a shorter time often becomes uneven again.
    calm_seconds: float = 60.0
    # Share of the variance of the ranks' own time that the received bytes must explain.
    explained: float = 0.5
    # Share of the steps in which a rank must receive most to be named.
    usual_share: float = 0.75


DEFAULTS = RoutingImbalanceSettings()
