"""Thresholds of the slower steps detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import FALSE_ALARMS_PER_STEP


@dataclass(frozen=True, slots=True)
class SlowerStepsSettings:
    """Thresholds: how much longer the steps of a job must take, and for how long."""

    # Caches, other jobs on a switch and allocators change the step time of a whole job by some
    # percent.
    slowdown: float = 1.15
    # A gradual change has no onset that would confirm it.
    gradual_slowdown: float = 1.25
    # Two runs differ in where their memory lies and in who else uses the network.
    slowdown_since_restart: float = 1.2
    # A backup, a scan or another job on the file system often lasts for some seconds.
    lasting_seconds: float = 15.0
    # A shorter slowdown is no reason for an alert; load of other programs never is.
    warning_seconds: float = 900.0
    false_alarms_per_step: float = FALSE_ALARMS_PER_STEP


DEFAULTS = SlowerStepsSettings()
