"""The telemetry of a synthetic job's nodes, under the names of the agent's collectors.

It consists of normal values with noise, harmless anomalies, and the signature of each fault's
cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from paceline_evaluation.emission import JOB
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.shape import JobShape
from paceline_wire import metric_names
from paceline_wire.batch import Sample

_REASONS = (
    "gpu_idle",
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
)
_CLOCK_MHZ = 1980.0
_STRENGTH = (0.5, 1.2)  # range of the strength of a fault: multiplies the rates below
_GIBIBYTE = float(1 << 30)

# Cause -> GPU gauge -> value.
_GAUGES: dict[str, dict[str, float]] = {
    "thermal": {metric_names.GPU_TEMP: 91.0},
    "power": {metric_names.GPU_POWER_USAGE: 400.0, metric_names.GPU_ENFORCED_POWER_LIMIT: 400.0},
    "pcie": {metric_names.GPU_PCIE_WIDTH: 4.0},
}
_ACTIVE_REASONS = {
    "thermal": {"sw_thermal_slowdown", "hw_slowdown"},
    "power": {"sw_power_cap"},
}
# Cause -> counter -> growth per second, at a strength of 1 (see _STRENGTH).
_GPU_RATES = {"ecc": {metric_names.GPU_ECC_SBE_VOL_TOTAL: 60.0}}
_NODE_RATES: dict[str, dict[str, float]] = {
    "cpu": {metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL: 0.75},
    "memory": {
        metric_names.PRESSURE_MEMORY_WAITING_SECONDS_TOTAL: 0.6,
        metric_names.PRESSURE_MEMORY_STALLED_SECONDS_TOTAL: 0.4,
        metric_names.VMSTAT_PSWPIN: 9000.0,
        metric_names.VMSTAT_PSWPOUT: 9000.0,
        metric_names.VMSTAT_PGMAJFAULT: 9000.0,
    },
    "disk": {
        metric_names.PRESSURE_IO_WAITING_SECONDS_TOTAL: 0.7,
        metric_names.PRESSURE_IO_STALLED_SECONDS_TOTAL: 0.5,
        metric_names.DISK_IO_TIME_SECONDS_TOTAL: 0.8,
    },
}
_SWITCHES, _CONTENDED_SWITCHES = 5.0, 2500.0  # involuntary context switches of a rank per second
_PORT_RATES = {
    "nic errors": {
        "symbol_error_total": 400.0,
        "port_errors_received_total": 120.0,
        "packet_sequence_errors_total": 300.0,
        "out_of_sequence_packets_received_total": 300.0,
        "local_ack_timeout_errors_total": 20.0,
        "link_error_recovery_total": 0.2,
    },
    "congestion": {
        "port_transmit_wait_total": 4.0e7,
        "np_cnp_packets_sent_total": 9000.0,
        "rp_cnp_packets_handled_total": 9000.0,
        "np_ecn_marked_roce_packets_received_total": 30000.0,
    },
}
_PORT_COUNTERS = sorted(
    {"link_downed_total", *(name for rates in _PORT_RATES.values() for name in rates)}
)
_NODE_COUNTERS = {
    metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL: 0.04,
    metric_names.PRESSURE_IO_WAITING_SECONDS_TOTAL: 0.02,
    metric_names.PRESSURE_IO_STALLED_SECONDS_TOTAL: 0.01,
    metric_names.PRESSURE_MEMORY_WAITING_SECONDS_TOTAL: 0.0,
    metric_names.PRESSURE_MEMORY_STALLED_SECONDS_TOTAL: 0.0,
    metric_names.DISK_IO_TIME_SECONDS_TOTAL: 0.08,
    metric_names.VMSTAT_PSWPIN: 0.0,
    metric_names.VMSTAT_PSWPOUT: 0.0,
    metric_names.VMSTAT_PGMAJFAULT: 3.0,
    metric_names.NODE_CONTEXT_SWITCHES_TOTAL: 50_000.0,
}
_PORT_BYTES_PER_SECOND = 50e9


@dataclass(slots=True)
class _HarmlessAnomaly:
    """An anomaly of a node that is present from the start and harmless."""

    hot_gpu: int | None = None  # index of a GPU that is 10 degrees hotter, but not throttled
    corrected_errors: bool = False  # a few old errors
    downed_links: float = 0.0
    loaded: bool = False  # more CPU pressure than the other nodes


def _shown(
    normal: dict[str, float], faulty: dict[str, dict[str, float]], causes: dict[str, float]
) -> dict[str, float]:
    """Return measured values: `normal`, moved towards `faulty` by the strength of the causes."""
    shown = dict(normal)
    for cause, strength in causes.items():
        for name, value in faulty.get(cause, {}).items():
            usual = normal.get(name, 0.0)
            shown[name] = usual + (value - usual) * strength
    return shown


class NodeTelemetry:
    """The sweeps of all nodes. Counters grow with the time between two sweeps."""

    def __init__(
        self, shape: JobShape, chance: np.random.Generator, faults: tuple[TrialFault, ...]
    ) -> None:
        self.shape, self.chance, self.faults = shape, chance, faults
        self._counters: dict[tuple[str, str], float] = {}
        self._labels: dict[tuple[str, ...], dict[str, str]] = {}
        self._swept_seconds = np.zeros(shape.node_count)
        self._anomalies = [self._draw_anomaly() for _ in range(shape.node_count)]
        self._strength = {fault: float(chance.uniform(*_STRENGTH)) for fault in faults}
        self.idle: frozenset[int] = frozenset()  # ranks whose GPU is idle

    def _draw_anomaly(self) -> _HarmlessAnomaly:
        chance = self.chance
        kind = chance.integers(0, 12)
        return _HarmlessAnomaly(
            hot_gpu=int(chance.integers(self.shape.ranks_per_node)) if kind == 0 else None,
            corrected_errors=bool(kind == 1),
            downed_links=3.0 if kind == 2 else 0.0,
            loaded=bool(kind == 3),
        )

    def sweep(self, node: int, step: int, at_seconds: float, time_ns: int) -> list[Sample]:
        """Return the samples of one sweep. `time_ns` is on the node's clock."""
        elapsed = at_seconds - self._swept_seconds[node]
        self._swept_seconds[node] = at_seconds
        present = [fault for fault in self.faults if fault.is_active(step)]
        samples = [*self._host(node, present, elapsed, time_ns)]
        samples += self._port(node, present, elapsed, time_ns)
        for rank in self.shape.on_node(node):
            own = [fault for fault in present if rank in fault.ranks]
            samples += self._gpu(node, rank, own, elapsed, time_ns)
        return samples

    def _causes(self, present: Iterable[TrialFault]) -> dict[str, float]:
        """Return the strength of each cause."""
        return {fault.cause: self._strength[fault] for fault in present}

    def _gpu(
        self, node: int, rank: int, present: list[TrialFault], elapsed: float, time_ns: int
    ) -> Iterator[Sample]:
        gpu = str(rank % self.shape.ranks_per_node)
        labels = self._label("gpu", gpu)
        causes = self._causes(present)
        hot = self._anomalies[node].hot_gpu == int(gpu)
        noise = self.chance.normal(0.0, 1.0, 4)
        gauges = {
            metric_names.SM_CLOCK: self._clock(present) + 8.0 * noise[0],
            metric_names.GPU_TEMP: (71.0 if hot else 61.0) + noise[1],
            metric_names.GPU_POWER_USAGE: 520.0 + 15.0 * noise[2],
            metric_names.GPU_ENFORCED_POWER_LIMIT: 700.0,
            metric_names.GPU_UTIL: 0.0 if rank in self.idle else min(100.0, 98.0 + noise[3]),
            metric_names.GPU_SM_CLOCK_MAX_MHZ: _CLOCK_MHZ,
            metric_names.GPU_PCIE_WIDTH: 16.0,
            metric_names.GPU_PCIE_WIDTH_MAX: 16.0,
            metric_names.GPU_PCIE_GENERATION: 5.0,
            metric_names.GPU_PCIE_GENERATION_MAX: 5.0,
        }
        active: set[str] = set()
        rates = {
            metric_names.GPU_ECC_SBE_VOL_TOTAL: 0.0,
            metric_names.GPU_ECC_DBE_VOL_TOTAL: 0.0,
            metric_names.PCIE_REPLAY_COUNTER: 0.01,
        }
        for cause in causes:
            gauges |= _GAUGES.get(cause, {})
            active |= _ACTIVE_REASONS.get(cause, set())
        if causes.get("pcie", 0.0) > sum(_STRENGTH) / 2:
            gauges[metric_names.GPU_PCIE_WIDTH] = 8.0
        for name, value in gauges.items():
            yield Sample(name, labels, float(value), time_ns)
        for reason in _REASONS:
            reason_labels = self._label("gpu", gpu, "reason", reason)
            yield Sample(
                metric_names.GPU_THROTTLE_REASON, reason_labels, float(reason in active), time_ns
            )
        for name, rate in _shown(rates, _GPU_RATES, causes).items():
            start = 4.0 if "SBE" in name and self._anomalies[node].corrected_errors else 0.0
            yield self._counter(name, labels, f"{node}/{gpu}", rate, elapsed, time_ns, start)
        yield from self._process(rank, causes, elapsed, time_ns)

    def _clock(self, present: list[TrialFault]) -> float:
        factor = max(
            (fault.factor for fault in present if fault.cause in ("thermal", "power")), default=1.0
        )
        return _CLOCK_MHZ / factor

    def _process(
        self, rank: int, causes: dict[str, float], elapsed: float, time_ns: int
    ) -> Iterator[Sample]:
        labels = self._label("job", JOB, "rank", str(rank))
        yield Sample(metric_names.RANK_NUMA_MISBOUND, labels, float("numa" in causes), time_ns)
        rate = _SWITCHES + _CONTENDED_SWITCHES * causes.get("cpu", 0.0)
        switches = self._label("job", JOB, "rank", str(rank), "kind", "involuntary")
        name = metric_names.RANK_PROCESS_CONTEXT_SWITCHES_TOTAL
        yield self._counter(name, switches, str(rank), rate, elapsed, time_ns)
        name = metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL
        yield self._counter(name, labels, str(rank), 1.0, elapsed, time_ns)
        faults = metric_names.RANK_PROCESS_MAJOR_FAULTS_TOTAL
        paging = 2000.0 * causes.get("memory", 0.0)
        yield self._counter(faults, labels, str(rank), paging, elapsed, time_ns)

    def _host(
        self, node: int, present: list[TrialFault], elapsed: float, time_ns: int
    ) -> Iterator[Sample]:
        # A slow link's cause is in the port, not in the host.
        causes = self._causes(one for one in present if one.node == node and not one.link)
        rates = dict(_NODE_COUNTERS)
        if self._anomalies[node].loaded:
            rates[metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL] = 0.25
        nothing, disk = self._label(), self._label("device", "nvme0n1")
        for name, rate in _shown(rates, _NODE_RATES, causes).items():
            labels = disk if name.startswith("node_disk") else nothing
            yield self._counter(name, labels, str(node), rate, elapsed, time_ns)
        total = 2048 * _GIBIBYTE
        available = (0.004 if "memory" in causes else 0.7) * total
        yield Sample(metric_names.MEMORY_MEMTOTAL_BYTES, nothing, total, time_ns)
        yield Sample(metric_names.MEMORY_MEMAVAILABLE_BYTES, nothing, available, time_ns)
        yield Sample(metric_names.NODE_LOAD1, nothing, 400.0 if "cpu" in causes else 20.0, time_ns)

    def _port(
        self, node: int, present: list[TrialFault], elapsed: float, time_ns: int
    ) -> Iterator[Sample]:
        labels = self._label("device", "mlx5_0", "port", "1")
        causes = self._causes(one for one in present if one.node == node and one.link)
        rate = _PORT_BYTES_PER_SECOND / (4.0 if "nic rate" in causes else 1.0)
        yield Sample(metric_names.INFINIBAND_RATE_BYTES_PER_SECOND, labels, rate, time_ns)
        rates = dict.fromkeys(_PORT_COUNTERS, 0.0) | {"port_transmit_wait_total": 1.0e5}
        for name, growth in _shown(rates, _PORT_RATES, causes).items():
            start = self._anomalies[node].downed_links if name == "link_downed_total" else 0.0
            full = f"node_infiniband_{name}"
            yield self._counter(full, labels, str(node), growth, elapsed, time_ns, start)

    def _counter(
        self,
        name: str,
        labels: dict[str, str],
        owner: str,
        rate: float,
        elapsed: float,
        time_ns: int,
        start: float = 0.0,
    ) -> Sample:
        key = (name, owner)
        noise = 1.0 + 0.1 * (float(self.chance.random()) - 0.5)
        value = self._counters.get(key, start) + rate * noise * elapsed
        self._counters[key] = value
        if not name.endswith("seconds_total"):
            value = float(int(value))
        return Sample(name, labels, value, time_ns)

    def _label(self, *pairs: str) -> dict[str, str]:
        """Return a cached dictionary, because a hundred thousand samples share few label
        combinations."""
        labels = self._labels.get(pairs)
        if labels is None:
            labels = self._labels[pairs] = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return labels
