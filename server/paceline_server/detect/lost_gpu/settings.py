"""Thresholds of the lost GPU detector. `Policy.gpu_hung_seconds` defines when a GPU is hung."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostGpuSettings:
    """Thresholds: how long the warning about a GPU lasts."""

    # A warning about a GPU that continues to work is cleared this long after its last error.
    error_reported_seconds: float = 600.0


DEFAULTS = LostGpuSettings()
