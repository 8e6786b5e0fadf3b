"""Recent measurements of all nodes, in memory, for the diagnosis of a finding.

Only metrics that a cause affects are stored, each with a bounded history: the newest samples as
they arrived, older ones some seconds apart, and an unchanged value as its first and last sample
only (most error counters never change). 10,240 GPUs with all their metrics fit into a few hundred
MiB; `make bench` measures it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline_wire import metric_names
from paceline_wire.batch import Sample

Floats = npt.NDArray[np.float64]
Elapsed = Callable[[float, float], float]

_GPU = ("gpu",)
_PORT = ("device", "port")
_DEVICE = ("device",)
_DEVICE_KIND = ("device", "kind")
_RANK = ("job", "rank")
_NODE: tuple[str, ...] = ()

# The metrics that are stored, and the labels that identify a series on its node. All other labels
# (UUID, Hostname, modelName, ...) add no information. Names: docs/concepts.md.
STORED_METRICS: Mapping[str, tuple[str, ...]] = {
    metric_names.SM_CLOCK: _GPU,
    metric_names.MEM_CLOCK: _GPU,
    metric_names.GPU_TEMP: _GPU,
    metric_names.GPU_ENFORCED_POWER_LIMIT: _GPU,
    metric_names.GPU_UTIL: _GPU,
    metric_names.GPU_POWER_VIOLATION: _GPU,
    metric_names.GPU_THERMAL_VIOLATION: _GPU,
    metric_names.PCIE_REPLAY_COUNTER: _GPU,
    metric_names.GPU_ECC_SBE_VOL_TOTAL: _GPU,
    metric_names.GPU_ECC_DBE_VOL_TOTAL: _GPU,
    metric_names.GPU_CORRECTABLE_REMAPPED_ROWS: _GPU,
    metric_names.GPU_UNCORRECTABLE_REMAPPED_ROWS: _GPU,
    metric_names.GPU_ROW_REMAP_FAILURE: _GPU,
    metric_names.GPU_ROW_REMAP_PENDING: _GPU,
    metric_names.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: _GPU,
    metric_names.NVLINK_REPLAY_ERROR_COUNT_TOTAL: _GPU,
    metric_names.NVLINK_RECOVERY_ERROR_COUNT_TOTAL: _GPU,
    metric_names.GPU_XID_ERRORS_COUNT: ("gpu", "xid"),
    metric_names.GPU_THROTTLE_REASON: ("gpu", "reason"),
    metric_names.GPU_PCIE_WIDTH: _GPU,
    metric_names.GPU_PCIE_WIDTH_MAX: _GPU,
    metric_names.GPU_PCIE_GENERATION: _GPU,
    metric_names.GPU_PCIE_GENERATION_MAX: _GPU,
    metric_names.GPU_NVLINK_ACTIVE_LINKS: _GPU,
    metric_names.GPU_LOST: _GPU,
    metric_names.GPU_HUNG: _GPU,
    metric_names.INFINIBAND_RATE_BYTES_PER_SECOND: _PORT,
    metric_names.INFINIBAND_STATE_ID: _PORT,
    metric_names.INFINIBAND_LINK_DOWNED_TOTAL: _PORT,
    metric_names.INFINIBAND_LINK_ERROR_RECOVERY_TOTAL: _PORT,
    metric_names.INFINIBAND_SYMBOL_ERROR_TOTAL: _PORT,
    metric_names.INFINIBAND_PORT_ERRORS_RECEIVED_TOTAL: _PORT,
    metric_names.INFINIBAND_PORT_DISCARDS_TRANSMITTED_TOTAL: _PORT,
    metric_names.INFINIBAND_LOCAL_LINK_INTEGRITY_ERRORS_TOTAL: _PORT,
    metric_names.INFINIBAND_PORT_TRANSMIT_WAIT_TOTAL: _PORT,
    metric_names.INFINIBAND_NP_CNP_PACKETS_SENT_TOTAL: _PORT,
    metric_names.INFINIBAND_RP_CNP_PACKETS_HANDLED_TOTAL: _PORT,
    metric_names.INFINIBAND_NP_ECN_MARKED_ROCE_PACKETS_RECEIVED_TOTAL: _PORT,
    metric_names.INFINIBAND_OUT_OF_SEQUENCE_PACKETS_RECEIVED_TOTAL: _PORT,
    metric_names.INFINIBAND_PACKET_SEQUENCE_ERRORS_TOTAL: _PORT,
    metric_names.INFINIBAND_LOCAL_ACK_TIMEOUT_ERRORS_TOTAL: _PORT,
    metric_names.INFINIBAND_ROCE_ADP_RETRANSMITS_TOTAL: _PORT,
    metric_names.NETWORK_SPEED_BYTES: _DEVICE,
    metric_names.NETWORK_CARRIER: _DEVICE,
    metric_names.NETWORK_CARRIER_CHANGES_TOTAL: _DEVICE,
    metric_names.NETWORK_RECEIVE_BYTES_TOTAL: _DEVICE,
    metric_names.NETWORK_TRANSMIT_BYTES_TOTAL: _DEVICE,
    metric_names.NETWORK_RECEIVE_ERRS_TOTAL: _DEVICE,
    metric_names.NETWORK_TRANSMIT_ERRS_TOTAL: _DEVICE,
    metric_names.NETWORK_RECEIVE_DROP_TOTAL: _DEVICE,
    metric_names.NETWORK_TRANSMIT_DROP_TOTAL: _DEVICE,
    metric_names.NETSTAT_TCP_RETRANSSEGS: _NODE,
    metric_names.DEVICE_PCIE_WIDTH: _DEVICE_KIND,
    metric_names.DEVICE_PCIE_WIDTH_MAX: _DEVICE_KIND,
    metric_names.DEVICE_PCIE_TRANSFERS_PER_SECOND: _DEVICE_KIND,
    metric_names.DEVICE_PCIE_TRANSFERS_PER_SECOND_MAX: _DEVICE_KIND,
    metric_names.KERNEL_EVENTS_TOTAL: ("kind", "code", "device"),
    metric_names.KERNEL_LOG_LOST_TOTAL: _NODE,
    metric_names.KERNEL_PROCESS_XIDS_TOTAL: ("code", "device", "owner"),
    metric_names.KERNEL_XID_INFO: ("xid", "meaning"),
    metric_names.OTHER_PROCESSES_CPUS: ("command",),
    metric_names.OTHER_PROCESSES_PID: ("command",),
    metric_names.RANK_GPU_OTHER_PROCESSES: _RANK,
    metric_names.RANK_GPU_OTHERS_UTILIZATION_RATIO: _RANK,
    metric_names.RANK_GPU_UTILIZATION_RATIO: _RANK,
    metric_names.RANK_KERNEL_EVENTS_TOTAL: (*_RANK, "kind"),
    metric_names.RANK_NUMA_MISBOUND: _RANK,
    metric_names.RANK_MEMORY_MISBOUND: _RANK,
    metric_names.RANK_NIC_MISPLACED: _RANK,
    metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL: _RANK,
    metric_names.RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL: _RANK,
    metric_names.RANK_READ_BYTES_TOTAL: _RANK,
    metric_names.RANK_PROCESS_WRITTEN_BYTES_TOTAL: _RANK,
    metric_names.RANK_TCP_INTERFACE_INFO: (*_RANK, "device"),
    metric_names.RANK_TCP_RETRANSMITTED_SEGMENTS_TOTAL: _RANK,
    metric_names.RANK_TCP_SENDING_SECONDS_TOTAL: _RANK,
    metric_names.RANK_TCP_SENT_BYTES_TOTAL: _RANK,
    metric_names.RANK_PROCESS_MAJOR_FAULTS_TOTAL: _RANK,
    metric_names.RANK_PROCESS_CONTEXT_SWITCHES_TOTAL: (*_RANK, "kind"),
    metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL: _NODE,
    metric_names.PRESSURE_MEMORY_WAITING_SECONDS_TOTAL: _NODE,
    metric_names.PRESSURE_IO_WAITING_SECONDS_TOTAL: _NODE,
    metric_names.NODE_CONTEXT_SWITCHES_TOTAL: _NODE,
    metric_names.MEMORY_MEMAVAILABLE_BYTES: _NODE,
    metric_names.MEMORY_MEMTOTAL_BYTES: _NODE,
    metric_names.VMSTAT_PGMAJFAULT: _NODE,
    metric_names.VMSTAT_PSWPIN: _NODE,
    metric_names.VMSTAT_PSWPOUT: _NODE,
    metric_names.DISK_IO_TIME_SECONDS_TOTAL: _DEVICE,
    metric_names.DISK_IO_TIME_WEIGHTED_SECONDS_TOTAL: _DEVICE,
    metric_names.FILESYSTEM_AVAIL_BYTES: ("mountpoint",),
    metric_names.FILESYSTEM_SIZE_BYTES: ("mountpoint",),
    metric_names.FILESYSTEM_READONLY: ("mountpoint",),
}
POINTS_PER_SERIES = 64
# Interval of older samples; the oldest are several times as far apart. A rank that has been slow
# for ten minutes can still be compared with its healthy past.
COARSE_NS = 10e9
MAX_AGE_NS = 1200e9
SERIES_PER_NODE = 1536  # a node of 8 GPUs, 10 ports and 16 disks has 600

Labels = tuple[str | None, ...]  # the values of those labels


class MetricSeries:
    """One metric of one device, rank or node, oldest sample first."""

    __slots__ = ("_flat",)

    def __init__(self) -> None:
        # One buffer: time, value, time, value, ... A double stores the time in ns to 256 ns.
        self._flat = array("d")

    def add(self, time_ns: int, value: float) -> None:
        flat, at = self._flat, float(time_ns)
        if flat and at <= flat[-2]:
            self._insert(at, value)
        elif len(flat) >= 4 and flat[-1] == value == flat[-3]:
            flat[-2] = at  # the value is unchanged
        else:
            flat.append(at)
            flat.append(value)
            if len(flat) > 2 * POINTS_PER_SERIES:
                self._thin()

    def _insert(self, at: float, value: float) -> None:
        """Insert a sample that was delivered late, or twice."""
        flat = self._flat
        index = len(flat)
        while index and flat[index - 2] > at:
            index -= 2
        if index and flat[index - 2] == at:
            return
        is_unchanged = 0 < index < len(flat) and flat[index - 1] == value == flat[index + 1]
        if not is_unchanged:
            flat.insert(index, value)
            flat.insert(index, at)
            if len(flat) > 2 * POINTS_PER_SERIES:
                self._thin()

    def _thin(self) -> None:
        """Drop samples of the older half that are close together; the oldest are thinned most."""
        flat = self._flat
        half = len(flat) // 4 * 2
        oldest_ns = flat[-2] - MAX_AGE_NS
        thinned = array("d")
        for index in range(0, half, 2):
            at = flat[index]
            if at >= oldest_ns and (not thinned or at - thinned[-2] >= COARSE_NS):
                thinned.extend(flat[index : index + 2])
        if len(thinned) > half * 3 // 4:
            older = len(thinned) // 4 * 2
            thinned = array("d", _every_second(thinned[:older])) + thinned[older:]
        flat[:half] = thinned

    def __len__(self) -> int:
        return len(self._flat) // 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return (time_ns, value) pairs, oldest first."""
        return list(zip(self._flat[::2], self._flat[1::2], strict=True))

    def columns(self) -> tuple[Floats, Floats]:
        """Return copies of the times (ns) and values."""
        flat = np.array(self._flat)
        return flat[::2], flat[1::2]

    def latest(self) -> float | None:
        return self._flat[-1] if self._flat else None

    def latest_ns(self) -> float | None:
        return self._flat[-2] if self._flat else None

    def typical_before(self, time_ns: int) -> float | None:
        """Return the median over time before `time_ns`."""
        times, values = self.columns()
        return typical(times[times < time_ns], values[times < time_ns])

    def typical_since(self, time_ns: int) -> float | None:
        """Return the median over time since `time_ns`; if there is none, the newest."""
        times, values = self.columns()
        since = typical(times[times >= time_ns], values[times >= time_ns])
        return self.latest() if since is None else since

    def rate_since(self, time_ns: int, seconds: Elapsed | None = None) -> float | None:
        """Return the growth per second of a counter from its last value before `time_ns` to now.

        `seconds`: returns the time between two moments (ns) that counts; default: all of it.
        """
        return self._rate_between(time_ns, math.inf, seconds)

    def newest_rate(self) -> float | None:
        """Return the growth per second of a counter between its last two samples."""
        times, values = self.columns()
        return _rate(times[-2:], values[-2:])

    def rate_before(self, time_ns: int, seconds: float = math.inf) -> float | None:
        """Return the growth per second before `time_ns`, of the last `seconds` at most."""
        return self._rate_between(time_ns - seconds * 1e9, time_ns)

    def _rate_between(
        self, start_ns: float, end_ns: float, seconds: Elapsed | None = None
    ) -> float | None:
        """Return the growth per second from the last value before `start_ns` to that before
        `end_ns`.

        Of a run of equal samples only the ends are stored: a time within it has the same value.
        """
        times, values = self.columns()
        first, end = np.searchsorted(times, (start_ns, end_ns)).tolist()
        if 0 < end < len(times) and values[end - 1] == values[end]:
            times[end] = end_ns
            end += 1
        if 0 < first < len(times) and values[first - 1] == values[first]:
            times[first - 1] = start_ns
        first = max(first - 1, 0)
        return _rate(times[first:end], values[first:end], seconds)


def _every_second(flat: array[float]) -> Iterator[float]:
    for index in range(0, len(flat), 4):
        yield from flat[index : index + 2]


def typical(times: Floats, values: Floats) -> float | None:
    """Return the median over time: a sample counts for the time between its neighbors."""
    if times.size < 2:
        return float(values[0]) if times.size else None
    middles = (times[1:] + times[:-1]) / 2
    edges = np.concatenate((times[:1], middles, times[-1:]))
    order = np.argsort(values, kind="stable")
    elapsed = np.cumsum(np.diff(edges)[order])
    return float(values[order[np.searchsorted(elapsed, elapsed[-1] / 2)]])


def without_dips(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the series without invalid readings, which are single lower values between higher
    ones.

    If it were treated as a reset, the whole counter value would count as growth.
    """
    if values.size < 3:
        return times, values
    fell = values[1:-1] < values[:-2]
    good = np.ones(values.size, dtype=np.bool_)
    good[1:-1] = ~(fell & (values[2:] >= values[:-2]))
    return times[good], values[good]


def _rate(times: Floats, values: Floats, seconds: Elapsed | None = None) -> float | None:
    """Return the growth per second; None without elapsed time, or if there was only a reset."""
    times, values = without_dips(times, values)
    if times.size < 2 or times[-1] <= times[0]:
        return None
    growth = np.diff(values)
    if (growth < 0).any() and not (growth > 0).any():
        return None
    elapsed = (times[-1] - times[0]) / 1e9
    counted = elapsed if seconds is None else seconds(times[0], times[-1])
    return float(growth[growth > 0].sum() / (counted if counted > 0 else elapsed))


@dataclass(slots=True)
class _Node:
    """Series of one node, by metric, then by the values of its labels."""

    metrics: dict[str, dict[Labels, MetricSeries]] = field(default_factory=dict)
    series: int = 0


class Telemetry:
    """Samples of all nodes that run ranks of the job, or could run some."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # One copy of each tuple of labels, shared by all series that have it.
        self._labels: dict[Labels, Labels] = {}

    def add(self, node: str, sample: Sample, clock_shift_ns: int = 0) -> None:
        self.extend(node, (sample,), clock_shift_ns)

    def extend(self, node: str, samples: Iterable[Sample], clock_shift_ns: int = 0) -> None:
        """Add samples. Performance matters: every sample of every node is added here."""
        stored = self._nodes.get(node)
        if stored is None:
            stored = self._nodes[node] = _Node()
        metrics = stored.metrics
        for sample in samples:
            name = sample.name
            names = STORED_METRICS.get(name)
            if names is None:
                continue
            by_labels = metrics.get(name)
            if by_labels is None:
                by_labels = metrics[name] = {}
            key: Labels = tuple(map(sample.labels.get, names))
            series = by_labels.get(key)
            if series is None:
                if stored.series >= SERIES_PER_NODE:
                    continue
                stored.series += 1
                series = by_labels[self._labels.setdefault(key, key)] = MetricSeries()
            series.add(sample.time_ns + clock_shift_ns, sample.value)

    def find(self, node: str, name: str, **labels: str) -> MetricSeries | None:
        """Return the series with exactly these labels, all of which must be stored labels."""
        stored = self._nodes.get(node)
        names = STORED_METRICS.get(name)
        if stored is None or names is None or not labels.keys() <= set(names):
            return None
        return stored.metrics.get(name, {}).get(tuple([labels.get(label) for label in names]))

    def latest(self, node: str, name: str, **labels: str) -> float | None:
        series = self.find(node, name, **labels)
        return None if series is None else series.latest()

    def all_of(
        self, node: str, name: str, **labels: str
    ) -> Iterator[tuple[dict[str, str], MetricSeries]]:
        """Yield (labels, series) of each series of a metric on a node that has these labels."""
        stored = self._nodes.get(node)
        if stored is None:
            return
        for key, series in stored.metrics.get(name, {}).items():
            values = zip(STORED_METRICS[name], key, strict=True)
            found = {label: value for label, value in values if value is not None}
            if labels.items() <= found.items():
                yield found, series

    def throttle_reasons(self, node: str, gpu: int) -> dict[str, MetricSeries]:
        """Return the 0/1 series of each throttle reason of one GPU."""
        found = self.all_of(node, metric_names.GPU_THROTTLE_REASON, gpu=str(gpu))
        return {labels["reason"]: series for labels, series in found if "reason" in labels}
