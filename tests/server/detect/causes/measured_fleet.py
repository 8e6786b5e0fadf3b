"""Simulated nodes that consist of samples: healthy, noisy and different; a test makes one faulty.

Healthy nodes look as in real fleets: GPUs differ by a few degrees, power caps are active without
effect, ports have old errors, and disks have bursts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.telemetry import Telemetry
from paceline_server.steps.groups import Groups
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology

SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS
JOB = "job-measured"
STEP_SECONDS = 1.0

# (seconds since the onset, healthy value or growth per second) -> value of the faulty device
Fault = Callable[[float, float], float]


@dataclass(frozen=True)
class Metric:
    """A metric. `typical`: a level, or the growth per second of a counter.

    `differs`: spread between devices.
    """

    name: str
    scope: str  # "gpu", "rank", "node", "port", "nic", "disk", "mount"
    seconds: float  # time between samples
    typical: float
    noise: float = 0.0
    differs: float = 0.0
    is_counter: bool = False
    begins: float = 0.0  # largest initial value of a counter
    labels: tuple[tuple[str, str], ...] = ()


def counter(name: str, scope: str, seconds: float, rate: float = 0.0, **more: float) -> Metric:
    return Metric(name, scope, seconds, rate, is_counter=True, **more)  # type: ignore[arg-type]


_IB, _REASON = "node_infiniband_", "paceline_gpu_throttle_reason"
METRICS: tuple[Metric, ...] = (
    Metric("DCGM_FI_DEV_SM_CLOCK", "gpu", 1, 1965, noise=8, differs=6),
    Metric("DCGM_FI_DEV_MEM_CLOCK", "gpu", 1, 2619),
    Metric("DCGM_FI_DEV_GPU_TEMP", "gpu", 1, 62, noise=1, differs=4),
    Metric("paceline_gpu_pcie_width", "gpu", 1, 16),
    Metric("paceline_gpu_pcie_width_max", "gpu", 1, 16),
    Metric("paceline_gpu_pcie_generation", "gpu", 1, 5),
    Metric("paceline_gpu_nvlink_active_links", "gpu", 1, 18),
    Metric("paceline_gpu_lost", "gpu", 1, 0),
    *(
        Metric(_REASON, "gpu", 1, 0, labels=(("reason", reason),))
        for reason in ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_slowdown")
    ),
    Metric(_REASON, "gpu", 1, 1, labels=(("reason", "sw_power_cap"),)),  # a busy H100
    Metric(_REASON, "gpu", 1, 0, labels=(("reason", "hw_power_brake"),)),
    counter("DCGM_FI_DEV_THERMAL_VIOLATION", "gpu", 1, begins=5e9),
    counter("DCGM_FI_DEV_POWER_VIOLATION", "gpu", 1, 0.02e9, noise=0.01e9, begins=5e12),
    counter("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "gpu", 1, begins=300),
    counter("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "gpu", 1),
    counter("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "gpu", 1, begins=2),
    counter("DCGM_FI_DEV_ROW_REMAP_PENDING", "gpu", 1),
    counter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "gpu", 1, 0.01, begins=2000),
    counter("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "gpu", 1, begins=9),
    Metric("paceline_rank_numa_misbound", "rank", 10, 0),
    Metric("paceline_rank_gpu_other_processes", "rank", 1, 0),
    counter(
        "paceline_rank_process_run_queue_wait_seconds_total", "rank", 2, 0.005, noise=0.004
    ),
    counter("paceline_rank_read_bytes_total", "rank", 2, 5e6, noise=1e6),
    counter("paceline_rank_process_written_bytes_total", "rank", 2, 1e6, noise=1e5),
    Metric(
        "paceline_rank_process_context_switches_total", "rank", 2, 6, noise=4, is_counter=True,
        labels=(("kind", "involuntary"),),
    ),
    counter("node_pressure_cpu_waiting_seconds_total", "node", 2, 0.05, noise=0.03),
    counter("node_pressure_memory_waiting_seconds_total", "node", 2),
    counter("node_pressure_io_waiting_seconds_total", "node", 2, 0.02, noise=0.02),
    counter("node_vmstat_pgmajfault", "node", 2, 3, noise=3, begins=1e6),
    counter("node_vmstat_pswpin", "node", 2, begins=1e4),
    counter("node_vmstat_pswpout", "node", 2, begins=1e4),
    Metric("node_memory_MemAvailable_bytes", "node", 2, 1.4e12, noise=1e9),
    Metric("node_memory_MemTotal_bytes", "node", 2, 2e12),
    counter("node_disk_io_time_seconds_total", "disk", 2, 0.05, noise=0.04, begins=1e5),
    counter("node_disk_io_time_weighted_seconds_total", "disk", 2, 0.1, noise=0.08, begins=1e5),
    Metric("node_filesystem_avail_bytes", "mount", 2, 8e12),
    Metric("node_filesystem_size_bytes", "mount", 2, 20e12),
    Metric(f"{_IB}rate_bytes_per_second", "port", 5, 50e9),
    Metric(f"{_IB}state_id", "port", 5, 4),
    counter(f"{_IB}link_downed_total", "port", 5, begins=3),
    counter(f"{_IB}symbol_error_total", "port", 5, begins=40),
    counter(f"{_IB}port_errors_received_total", "port", 5, begins=40),
    counter(f"{_IB}port_transmit_wait_total", "port", 5, 2e4, noise=1e4, begins=1e9),
    counter(f"{_IB}np_cnp_packets_sent_total", "port", 5, 10, noise=8, begins=1e6),
    counter(f"{_IB}roce_adp_retransmits_total", "port", 5, 0.05, noise=0.05, begins=1e3),
    counter(f"{_IB}out_of_sequence_packets_received_total", "port", 5, 0.1, noise=0.1),
    Metric("node_network_speed_bytes", "nic", 5, 12.5e9),
    Metric("node_network_carrier", "nic", 5, 1),
    Metric("paceline_device_pcie_width", "pci", 10, 16),
    Metric("paceline_device_pcie_width_max", "pci", 10, 16),
    counter("node_network_receive_drop_total", "nic", 5, 0.2, noise=0.2, begins=1e4),
    counter("node_netstat_Tcp_RetransSegs", "node", 2, 0.5, noise=0.5, begins=1e4),
    counter("paceline_rank_tcp_retransmitted_segments_total", "rank", 10, 0.2, noise=0.2),
    counter("paceline_kernel_log_lost_total", "node", 1),
    counter("paceline_rank_process_cpu_seconds_total", "rank", 2, 0.6),
)  # fmt: skip


@dataclass
class Fleet:
    """A fleet of nodes.

    `sick`: faults by (node, metric, label value, or None for the whole node).
    """

    seed: int = 0
    nodes: int = 4
    gpus: int = 2
    ports: int = 2
    onset_seconds: float = 60.0
    sick: dict[tuple[str, str, str | None], Fault] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)  # metrics that no agent can read
    skew_seconds: dict[str, float] = field(default_factory=dict)
    states: dict[int, LiveRank] = field(default_factory=dict)
    steps: int = 0  # finished since the first one, of `STEP_SECONDS`; 0: not known

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.telemetry = Telemetry()
        world = self.nodes * self.gpus
        self.generation = Generation(
            job=JOB,
            number=0,
            topology=Topology(world, 1, 1),
            nodes={rank: f"node-{rank // self.gpus}" for rank in range(world)},
            gpus={rank: rank % self.gpus for rank in range(world)},
            started_ns=START_NS,
        )
        # Each node has its own phase, because agents do not sample at the same moments.
        self.phase = {f"node-{n}": self.chance.random() for n in range(self.nodes)}

    def fault(self, node: str, metric: str, which: str | None, fault: Fault) -> None:
        self.sick[node, metric, which] = fault

    def samples(self, until_seconds: float) -> list[tuple[str, Sample]]:
        """Return all samples of the first `until_seconds` in time order."""
        found = [
            (node, sample)
            for node in self.phase
            if node not in self.silent
            for metric in METRICS
            if metric.name not in self.absent
            for labels, which in self._places(node, metric)
            for sample in self._series(node, metric, labels, which, until_seconds)
        ]
        found.sort(key=lambda each: each[1].time_ns)
        return found

    def play(self, until_seconds: float) -> None:
        for node, sample in self.samples(until_seconds):
            self.telemetry.add(node, sample)

    def _places(self, node: str, metric: Metric) -> Iterator[tuple[dict[str, str], str]]:
        more = dict(metric.labels)
        number = int(node.removeprefix("node-"))
        if metric.scope == "gpu":
            for gpu in range(self.gpus):
                yield {"gpu": str(gpu), "UUID": f"GPU-{number}-{gpu}", **more}, _which(gpu, more)
        elif metric.scope == "rank":
            for rank in range(number * self.gpus, (number + 1) * self.gpus):
                yield {"job": JOB, "rank": str(rank), **more}, str(rank)
        elif metric.scope == "port":
            for port in range(self.ports):
                yield {"device": f"mlx5_{port}", "port": "1"}, f"mlx5_{port}"
        elif metric.scope == "pci":
            for port in range(self.ports):
                yield {"device": f"mlx5_{port}", "kind": "rdma"}, f"mlx5_{port}"
        else:
            only = {
                "node": {},
                "nic": {"device": "eth0"},
                "disk": {"device": "nvme0n1"},
                "mount": {"mountpoint": "/data"},
            }[metric.scope]
            yield only, next(iter(only.values()), "")

    def _series(
        self, node: str, metric: Metric, labels: dict[str, str], which: str, until: float
    ) -> Iterator[Sample]:
        own = self.chance.gauss(0.0, metric.differs) if metric.differs else 0.0
        total = self.chance.uniform(0, metric.begins) // 1 if metric.begins else 0.0
        fault = self.sick.get((node, metric.name, which)) or self.sick.get(
            (node, metric.name, None)
        )
        at = self.phase[node] * metric.seconds
        while at < until:
            value = metric.typical + own
            if metric.noise:
                value = max(self.chance.gauss(value, metric.noise), 0.0)
            if fault is not None:
                value = fault(at - self.onset_seconds, value)
            if metric.is_counter:
                total += value * metric.seconds
                value = total
            time_ns = START_NS + round((at + self.skew_seconds.get(node, 0.0)) * SECOND_NS)
            yield Sample(metric.name, labels, value, time_ns)
            at += metric.seconds

    def observation(self) -> Observation:
        return Observation(
            now_ns=START_NS,
            steps=[SimpleNamespace(step=self.steps - 1)] if self.steps else [],  # type: ignore
            exits=[],
            device_events=[],
            ranks=self.states,
            last_seen_ns={},
            exited={},
            losses={},
            telemetry=self.telemetry,
            groups=Groups(len(self.generation.nodes)),
            step_seconds=STEP_SECONDS,
            step_seconds_p99=STEP_SECONDS,
            steps_finished=self.steps,
        )

    def diagnose(self, rank: int | None = 2, **more: object) -> Diagnosis:
        """Diagnose `rank`, slow since the onset; with two GPUs per node, 2 is gpu0 of node-1."""
        onset_ns = START_NS + round(self.onset_seconds * SECOND_NS)
        step = round(self.onset_seconds / STEP_SECONDS)
        more = {"slowdown": 1.5, "onset_step": step, **more}
        return diagnose(
            rank,
            onset_ns,
            observation=self.observation(),
            generation=self.generation,
            **more,  # type: ignore[arg-type]
        )


def since_onset(sick: float) -> Fault:
    """Return a fault that replaces the healthy value with `sick` after the onset."""
    return lambda after, healthy: sick if after >= 0 else healthy


def times(factor: float, begins: float = 0.0) -> Fault:
    return lambda after, healthy: healthy * factor if after >= begins else healthy


def once(count: float, at: float = 0.0, width: float = 10.0) -> Fault:
    """Return a fault: a counter jumps by about `count`, `at` seconds after the onset."""
    return lambda after, healthy: count / width if at <= after < at + width else healthy


def _which(gpu: int, labels: dict[str, str]) -> str:
    """Return the label value that identifies a series: `0`, or `0/sw_power_cap` for a throttle
    reason."""
    return "/".join([str(gpu), *labels.values()])
