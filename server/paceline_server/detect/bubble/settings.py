"""Thresholds of the bubble detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BubbleSettings:
    """Thresholds: how much longer than its schedule requires a pipeline must idle."""

    # Idle share beyond theory due to slow transfers, as a mean over the stages.
    excess: float = 0.12
    # The same for late launches and uneven microbatches. Scheduling jitter causes these as well:
    # on a machine with fewer cores than ranks it alone reaches 0.05 to 0.15.
    unexplained_excess: float = 0.30
    window_steps: int = 20
    hits: int = 16  # steps of the window in which the excess must occur
    # Excess from which the severity is warning instead of info.
    warning_excess: float = 0.25
    # The agents have measured by then how long ranks wait for a CPU.
    host_load_seconds: float = 10.0


DEFAULTS = BubbleSettings()
