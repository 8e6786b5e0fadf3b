"""Values that emulated GPUs of each model report instead of the defaults.

Recorded on an H200 (driver 590.48.01) and an L40S (595.80), both under load. Values that nvidia-smi
showed as N/A are unsupported.
"""

from __future__ import annotations

from collections.abc import Iterable

_H200_UNSUPPORTED = ("retired_pages",)
_L40S_UNSUPPORTED = ("retired_pages", "nvlink", "memory_temperature", "mig", "activity")

MODELS: dict[str, dict[str, float | Iterable[str] | str]] = {
    "demo": {"unsupported": ("retired_pages",)},
    "h200": {
        "unsupported": _H200_UNSUPPORTED,
        "memory_reserved_bytes": 614 << 20,
        "memory_used_bytes": 32_362 << 20,
        "utilization_percent": 100,
        "memory_utilization_percent": 7,
        "temperature_celsius": 52,
        "memory_temperature_celsius": 41,
        "power_milliwatts": 627_320,
    },
    "l40s": {
        "unsupported": _L40S_UNSUPPORTED,
        "name": "NVIDIA L40S",
        "vbios": "95.02.66.00.02",
        "pci_device_id": 0x26B910DE,
        "memory_total_bytes": 46_068 << 20,
        "memory_reserved_bytes": 609 << 20,
        "memory_used_bytes": 1_235 << 20,
        "sm_clock_mhz": 2520,
        "sm_clock_max_mhz": 2520,
        "memory_clock_mhz": 9001,
        "memory_clock_max_mhz": 9001,
        "video_clock_mhz": 1965,
        "video_clock_max_mhz": 1965,
        "utilization_percent": 9,
        "memory_utilization_percent": 2,
        "encoder_percent": 59,
        "temperature_celsius": 54,
        "shutdown_celsius": 93,
        "slowdown_celsius": 90,
        "maximum_celsius": 88,
        "power_milliwatts": 110_240,
        "power_limit_milliwatts": 350_000,
        "power_limit_default_milliwatts": 350_000,
        "power_limit_minimum_milliwatts": 100_000,
        "power_limit_maximum_milliwatts": 350_000,
        "power_violation_ns": 204_642_816_000,
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_transmitted_kb_per_second": 259_423,
        "pcie_received_kb_per_second": 2_012_109,
        "persistence_mode": 0,
        "nvlink_links": 0,
        "nvlink_links_active": 0,
    },
}
DRIVERS = {"demo": ("590.48.01", 13010), "h200": ("590.48.01", 13010), "l40s": ("595.80", 13020)}
