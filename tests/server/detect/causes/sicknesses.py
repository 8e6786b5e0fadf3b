"""The symptoms of each cause on a node, and metrics that look like a cause but are not one.

Magnitudes are drawn again for each seed, from just enough for a 10% slowdown upwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from measured_fleet import Fleet, once, since_onset, times

NODE, RANK, GPU, PORT = "node-1", "2", "0", "mlx5_0"  # rank 2 is gpu0 of node-1
REASON = "paceline_gpu_throttle_reason"
IB = "node_infiniband_"


@dataclass(frozen=True)
class Sickness:
    """A cause.

    `make` injects it, given the slowdown to explain; `seconds`: when it becomes visible.
    """

    cause: str
    kind: str
    make: Callable[[Fleet, random.Random, float], None]
    seconds: float = 12.0  # telemetry after the onset


def _slow_clock(fleet: Fleet, slowdown: float) -> None:
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", GPU, times(1 / slowdown))


def _reasons(fleet: Fleet, *reasons: str) -> None:
    for reason in reasons:
        fleet.fault(NODE, REASON, f"{GPU}/{reason}", since_onset(1.0))


def thermal(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    _slow_clock(fleet, slowdown)
    _reasons(
        fleet, *chance.choice((["hw_thermal_slowdown", "hw_slowdown"], ["sw_thermal_slowdown"]))
    )
    fleet.fault(NODE, "DCGM_FI_DEV_GPU_TEMP", GPU, since_onset(chance.uniform(84, 93)))
    fleet.fault(NODE, "DCGM_FI_DEV_THERMAL_VIOLATION", GPU, since_onset(chance.uniform(2e8, 9e8)))


def power(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    _slow_clock(fleet, slowdown)
    _reasons(fleet, "hw_power_brake", "hw_slowdown")
    fleet.fault(NODE, "DCGM_FI_DEV_POWER_VIOLATION", GPU, since_onset(chance.uniform(3e8, 9e8)))


def hardware(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    _slow_clock(fleet, slowdown)
    _reasons(fleet, "hw_slowdown")


def clock(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    _slow_clock(fleet, slowdown)


def memory_clock(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    fleet.fault(NODE, "DCGM_FI_DEV_MEM_CLOCK", GPU, times(1 / slowdown))


def counts(metric: str, which: str, fewest: float, most: float):
    def make(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
        fleet.fault(NODE, metric, which, once(chance.uniform(fewest, most), chance.uniform(0, 1)))

    return make


def single(metric: str, which: str):
    """Return a single event within a second of the onset."""

    def make(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
        seconds = 5.0 if metric.startswith(IB) else 1.0
        fleet.fault(NODE, metric, which, once(1.0, 0.0, seconds))

    return make


def rate(metric: str, which: str | None, least: float, most: float):
    def make(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
        fleet.fault(NODE, metric, which, since_onset(chance.uniform(least, most)))

    return make


def level(metric: str, which: str, *choices: float):
    def make(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
        fleet.fault(NODE, metric, which, since_onset(chance.choice(choices)))

    return make


def _stall(slowdown: float) -> float:
    """Return the share of time spent waiting that causes this slowdown."""
    return 1.0 - 1.0 / slowdown


def contention(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    wait = _stall(slowdown) + 0.02
    fleet.fault(NODE, "paceline_rank_process_run_queue_wait_seconds_total", RANK, since_onset(wait))
    pressure = min(wait * chance.uniform(1.2, 2.5), 1.0)
    fleet.fault(NODE, "node_pressure_cpu_waiting_seconds_total", "", since_onset(pressure))
    switches = since_onset(chance.uniform(200, 3000))
    fleet.fault(NODE, "paceline_rank_process_context_switches_total", RANK, switches)


def tcp_loss(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    again = chance.uniform(40, 5000)
    fleet.fault(NODE, "node_netstat_Tcp_RetransSegs", "", since_onset(again))
    fleet.fault(NODE, "paceline_rank_tcp_retransmitted_segments_total", RANK, since_onset(again))


def starved(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    """Simulate a memory shortage without swapping."""
    wait = _stall(slowdown) + 0.05
    fleet.fault(NODE, "node_pressure_memory_waiting_seconds_total", "", since_onset(wait))
    fleet.fault(NODE, "node_vmstat_pgmajfault", "", since_onset(chance.uniform(500, 9000)))
    fleet.fault(NODE, "node_memory_MemAvailable_bytes", "", since_onset(0.01 * 2e12))
    fleet.fault(NODE, "node_pressure_io_waiting_seconds_total", "", since_onset(wait / 2))


def swaps(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    starved(fleet, chance, slowdown)
    for metric in ("node_vmstat_pswpin", "node_vmstat_pswpout"):
        fleet.fault(NODE, metric, "", since_onset(chance.uniform(500, 20_000)))


def disk(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    wait = _stall(slowdown) + 0.15
    fleet.fault(NODE, "node_pressure_io_waiting_seconds_total", "", since_onset(wait))
    fleet.fault(NODE, "node_disk_io_time_seconds_total", "nvme0n1", since_onset(0.97))
    queue = since_onset(chance.uniform(4, 60))
    fleet.fault(NODE, "node_disk_io_time_weighted_seconds_total", "nvme0n1", queue)


def full(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    free = since_onset(chance.uniform(0, 1e11))
    fleet.fault(NODE, "node_filesystem_avail_bytes", "/data", free)


def cable(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    rate(f"{IB}symbol_error_total", PORT, 20, 5000)(fleet, chance, slowdown)
    rate(f"{IB}port_errors_received_total", PORT, 5, 500)(fleet, chance, slowdown)
    rate(f"{IB}out_of_sequence_packets_received_total", PORT, 10, 500)(fleet, chance, slowdown)


def loss(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    rate(f"{IB}roce_adp_retransmits_total", PORT, 20, 3000)(fleet, chance, slowdown)
    rate(f"{IB}out_of_sequence_packets_received_total", PORT, 20, 3000)(fleet, chance, slowdown)


def congestion(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    rate(f"{IB}np_cnp_packets_sent_total", PORT, 1_000, 90_000)(fleet, chance, slowdown)
    rate(f"{IB}port_transmit_wait_total", PORT, 1e6, 1e8)(fleet, chance, slowdown)


def flap(fleet: Fleet, chance: random.Random, slowdown: float) -> None:
    single(f"{IB}link_downed_total", PORT)(fleet, chance, slowdown)
    rate(f"{IB}symbol_error_total", PORT, 2, 50)(fleet, chance, slowdown)


ECC = "DCGM_FI_DEV_ECC_"
SICKNESSES: tuple[Sickness, ...] = (
    Sickness("thermal throttle", "straggler", thermal),
    Sickness("power throttle", "straggler", power),
    Sickness("hardware slowdown", "straggler", hardware),
    Sickness("low SM clock", "straggler", clock),
    Sickness("low memory clock", "straggler", memory_clock),
    Sickness("uncorrectable ECC errors", "straggler", single(f"{ECC}DBE_VOL_TOTAL", GPU)),
    Sickness("correctable ECC errors", "straggler", counts(f"{ECC}SBE_VOL_TOTAL", GPU, 60, 9000)),
    Sickness("row remapping", "straggler", single("DCGM_FI_DEV_ROW_REMAP_PENDING", GPU)),
    Sickness("degraded PCIe link", "straggler", level("paceline_gpu_pcie_width", GPU, 4.0, 8.0)),
    Sickness(
        "PCIe replays", "straggler", counts("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", GPU, 200, 9000)
    ),
    Sickness(
        "NVLink errors", "straggler", level("paceline_gpu_nvlink_active_links", GPU, 12.0, 17.0)
    ),
    Sickness("NUMA misbinding", "straggler", level("paceline_rank_numa_misbound", RANK, 1.0), 25),
    Sickness(
        "other processes on the GPU", "straggler",
        level("paceline_rank_gpu_other_processes", RANK, 1.0, 6.0),
    ),
    Sickness("CPU contention", "straggler", contention),
    Sickness("CPU contention", "host_noise", contention),
    Sickness("memory pressure", "straggler", starved),
    Sickness("swapping", "straggler", swaps),
    Sickness("slow disk", "slow_data", disk),
    Sickness("slow disk", "checkpoint_stall", disk),
    Sickness("disk full", "checkpoint_stall", full),
    Sickness("low link rate", "slow_link", level(f"{IB}rate_bytes_per_second", PORT, 25e9, 12.5e9)),
    Sickness("link errors", "slow_link", cable, 20),
    Sickness("packet loss", "slow_link", loss, 20),
    Sickness("packet loss", "slow_link", tcp_loss, 30),
    Sickness("network congestion", "slow_link", congestion, 20),
    Sickness("link down", "slow_link", flap, 20),
    Sickness(
        "degraded PCIe link of the NIC", "slow_link",
        level("paceline_device_pcie_width", PORT, 8.0), 25,
    ),
)  # fmt: skip


# Metrics that look like a cause. `sick` is the slow node.


def chronic_clock(fleet: Fleet, chance: random.Random) -> None:
    """Simulate a GPU that always ran at a lower clock."""
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", GPU, lambda after, healthy: 0.9 * healthy)


def warm_day(fleet: Fleet, chance: random.Random) -> None:
    """Simulate GPUs that all get hotter when the slowness begins."""
    for node in fleet.phase:
        fleet.fault(
            node, "DCGM_FI_DEV_GPU_TEMP", None, lambda after, healthy: healthy + 12 * (after > 0)
        )


def old_errors(fleet: Fleet, chance: random.Random) -> None:
    """Simulate counters that are high but do not change."""
    fleet.fault(NODE, f"{ECC}SBE_VOL_TOTAL", GPU, once(90_000, -200, 30))
    fleet.fault(NODE, f"{IB}link_downed_total", PORT, once(200, -200, 30))


def earlier_trouble(fleet: Fleet, chance: random.Random) -> None:
    """Simulate a problem of the same node well before the onset."""
    fleet.fault(NODE, f"{ECC}DBE_VOL_TOTAL", GPU, once(1, -45, 1))
    fleet.fault(NODE, f"{IB}symbol_error_total", PORT, once(300, -45, 5))


def neighbours_trouble(fleet: Fleet, chance: random.Random) -> None:
    """Simulate a throttled other GPU of the node, and a busy disk on another node."""
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", "1", times(0.6))
    fleet.fault(NODE, REASON, "1/hw_thermal_slowdown", since_onset(1.0))
    fleet.fault("node-2", "node_pressure_io_waiting_seconds_total", "", since_onset(0.8))


def everyones_trouble(fleet: Fleet, chance: random.Random) -> None:
    """Simulate congestion of the whole fabric and slightly higher load on every host."""
    for node in fleet.phase:
        fleet.fault(node, f"{IB}np_cnp_packets_sent_total", None, times(50))
        fleet.fault(node, "node_pressure_cpu_waiting_seconds_total", None, times(4))


def small_drop(fleet: Fleet, chance: random.Random) -> None:
    """Simulate a clock that is 3% lower since the onset, which does not explain a slowdown of
    40%."""
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", GPU, times(0.97))


DISTRACTORS = (
    chronic_clock,
    warm_day,
    old_errors,
    earlier_trouble,
    neighbours_trouble,
    everyones_trouble,
    small_drop,
)
