"""Fields of one emulated GPU, and the calls that can be made to fail."""

from __future__ import annotations

import ctypes

PROCESSES = 4  # per GPU

Kind = type[ctypes.c_uint32] | type[ctypes.c_uint64] | type[ctypes.c_double]
u32, u64, f64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double

# name, type, value of a healthy H200 under load
FIELDS: tuple[tuple[str, Kind, float], ...] = (
    ("throttle_reasons", u64, 0),  # NVML's bits, see THROTTLE_REASONS
    ("unsupported", u64, 0),  # bits of CALLS that return NOT_SUPPORTED
    ("denied", u64, 0),  # bits of CALLS that return NO_PERMISSION
    ("failing", u64, 0),  # bits of CALLS that return UNKNOWN, which a retry may fix
    ("refused", u64, 0),  # written by the library: calls that returned one of the first two
    ("memory_total_bytes", u64, 143_771 << 20),
    ("memory_reserved_bytes", u64, 617 << 20),
    ("memory_used_bytes", u64, 96_420 << 20),
    ("ecc_sbe_volatile", u64, 0),
    ("ecc_dbe_volatile", u64, 0),
    ("ecc_sbe_aggregate", u64, 0),
    ("ecc_dbe_aggregate", u64, 0),
    ("nvlink_crc_flit_errors", u64, 0),
    ("nvlink_crc_data_errors", u64, 0),
    ("nvlink_replay_errors", u64, 0),
    ("nvlink_recovery_errors", u64, 0),
    ("power_violation_ns", u64, 0),
    ("thermal_violation_ns", u64, 0),
    ("energy_millijoules", u64, 1_250_000_000),
    ("xid_count", u64, 0),
    ("nvlink_transmitted_kib", u64, 81_920_000),
    ("nvlink_received_kib", u64, 81_408_000),
    ("sync_boost_violation_ns", u64, 0),
    ("board_limit_violation_ns", u64, 0),
    ("low_utilization_violation_ns", u64, 0),
    ("reliability_violation_ns", u64, 0),
    ("app_clocks_violation_ns", u64, 0),
    ("base_clocks_violation_ns", u64, 0),
    ("software_thermal_ns", u64, 0),
    ("hardware_thermal_ns", u64, 0),
    ("power_brake_ns", u64, 0),
    ("pcie_transmitted_bytes", u64, 7_340_032_000),
    ("pcie_received_bytes", u64, 15_099_494_400),
    *((f"process_bytes_{slot}", u64, 0) for slot in range(PROCESSES)),
    ("hang_seconds", f64, 0.0),  # calls on this GPU block for this long, or until it is set to 0
    ("lost", u32, 0),
    ("error", u32, 0),  # NVML error that every call on this GPU returns
    ("strange_field", u32, 0),  # number of a field whose value has a type that is not in nvml.h
    ("clock_stopped", u32, 0),  # 1: energy does not increase by itself
    ("sm_clock_mhz", u32, 1980),
    ("sm_clock_max_mhz", u32, 1980),
    ("memory_clock_mhz", u32, 3201),
    ("memory_clock_max_mhz", u32, 3201),
    ("temperature_celsius", u32, 46),
    ("memory_temperature_celsius", u32, 55),
    ("power_milliwatts", u32, 512_400),
    ("power_limit_milliwatts", u32, 700_000),
    ("utilization_percent", u32, 97),
    ("memory_utilization_percent", u32, 41),
    ("pcie_generation", u32, 5),
    ("pcie_generation_max", u32, 5),
    ("pcie_width", u32, 16),
    ("pcie_width_max", u32, 16),
    ("pcie_replays", u32, 0),
    ("xid", u32, 0),  # the last XID; a write counts one more
    ("remapped_rows_correctable", u32, 0),
    ("remapped_rows_uncorrectable", u32, 0),
    ("remap_failure", u32, 0),
    ("nvlink_links", u32, 18),
    ("nvlink_links_active", u32, 18),
    ("nvlink_error_link", u32, 0),  # the link that has the errors
    ("nvlink_megabytes_per_second", u32, 26_562),  # per link
    ("nvlink_links_per_peer", u32, 0),  # direct links to each other GPU; 0: all to NVSwitches
    ("sm_active_percent", f64, 88.0),
    ("sm_occupancy_percent", f64, 31.0),
    ("tensor_active_percent", f64, 57.0),
    ("fp64_active_percent", f64, 0.0),
    ("fp32_active_percent", f64, 9.0),
    ("fp16_active_percent", f64, 3.0),
    ("remap_pending", u32, 0),
    ("retired_pages_sbe", u32, 0),
    ("retired_pages_dbe", u32, 0),
    ("retired_pages_pending", u32, 0),
    ("video_clock_mhz", u32, 1545),
    ("video_clock_max_mhz", u32, 1545),
    ("encoder_percent", u32, 0),
    ("decoder_percent", u32, 0),
    ("shutdown_celsius", u32, 95),
    ("slowdown_celsius", u32, 89),
    ("maximum_celsius", u32, 87),
    ("memory_maximum_celsius", u32, 95),
    ("power_limit_default_milliwatts", u32, 700_000),
    ("power_limit_minimum_milliwatts", u32, 200_000),
    ("power_limit_maximum_milliwatts", u32, 700_000),
    ("pcie_transmitted_kb_per_second", u32, 4_217),
    ("pcie_received_kb_per_second", u32, 8_691),
    ("persistence_mode", u32, 1),
    ("ecc_mode", u32, 1),
    ("ecc_mode_pending", u32, 1),
    ("mig_mode", u32, 0),
    ("mig_instances", u32, 0),  # each has a seventh of the GPU
    ("mig_memory_used_mib_each", u32, 0),
    ("pci_device_id", u32, 0x233510DE),
    *((f"process_pid_{slot}", u32, 0) for slot in range(PROCESSES)),
    *((f"process_percent_{slot}", u32, 0) for slot in range(PROCESSES)),  # SM time
)
TEXTS = (("uuid", 80), ("pci_bus_id", 32), ("name", 96), ("vbios", 32))

# Calls that a GPU can leave unsupported, deny or fail.
CALLS = {
    name: 1 << bit
    for bit, name in enumerate(
        (
            "power", "ecc", "nvlink", "memory_temperature", "retired_pages", "mig", "processes",
            "encoder", "pcie_throughput", "pcie_counters", "throttle_counters", "thresholds",
            "margins", "remapped_rows", "video_clock", "utilization", "violations", "energy",
            "events", "nvlink_counters", "persistence", "power_limits", "vbios", "link_scopes",
            "handle", "nvlink_ends", "activity", "process_utilization",
        )
    )
}  # fmt: skip

THROTTLE_REASONS = {  # nvml.h, nvmlClocksEventReason*
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
