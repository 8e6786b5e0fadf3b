"""What nodes measured of late, kept for the question "and what was the hardware doing then?".

Only the metrics that a cause can be read from are kept, a bounded history of each: the newest
samples as they came, older ones some seconds apart, and a value that holds on as its first and
last sample only (most counters of errors never move). 10,240 GPUs with all their metrics fit into
a few hundred MiB; `make bench` measures it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline_wire.batch import Sample

Floats = npt.NDArray[np.float64]

_GPU = ("gpu",)
_PORT = ("device", "port")
_DEVICE = ("device",)
_DEVICE_KIND = ("device", "kind")
_RANK = ("job", "rank")
_NODE: tuple[str, ...] = ()

# What is kept, and the labels that tell one thing's series from another's on its node. All others
# (UUID, Hostname, modelName, ...) say nothing that these do not. Names: docs/concepts.md.
KEPT: Mapping[str, tuple[str, ...]] = {
    "DCGM_FI_DEV_SM_CLOCK": _GPU,
    "DCGM_FI_DEV_MEM_CLOCK": _GPU,
    "DCGM_FI_DEV_GPU_TEMP": _GPU,
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": _GPU,
    "DCGM_FI_DEV_GPU_UTIL": _GPU,
    "DCGM_FI_DEV_POWER_VIOLATION": _GPU,
    "DCGM_FI_DEV_THERMAL_VIOLATION": _GPU,
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": _GPU,
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": _GPU,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _GPU,
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": _GPU,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": _GPU,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _GPU,
    "DCGM_FI_DEV_ROW_REMAP_PENDING": _GPU,
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": _GPU,
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": _GPU,
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": _GPU,
    "DCGM_EXP_XID_ERRORS_COUNT": ("gpu", "xid"),
    "paceline_gpu_throttle_reason": ("gpu", "reason"),
    "paceline_gpu_pcie_width": _GPU,
    "paceline_gpu_pcie_width_max": _GPU,
    "paceline_gpu_pcie_generation": _GPU,
    "paceline_gpu_pcie_generation_max": _GPU,
    "paceline_gpu_nvlink_active_links": _GPU,
    "paceline_gpu_lost": _GPU,
    "paceline_gpu_hung": _GPU,
    "node_infiniband_rate_bytes_per_second": _PORT,
    "node_infiniband_state_id": _PORT,
    "node_infiniband_link_downed_total": _PORT,
    "node_infiniband_link_error_recovery_total": _PORT,
    "node_infiniband_symbol_error_total": _PORT,
    "node_infiniband_port_errors_received_total": _PORT,
    "node_infiniband_port_discards_transmitted_total": _PORT,
    "node_infiniband_local_link_integrity_errors_total": _PORT,
    "node_infiniband_port_transmit_wait_total": _PORT,
    "node_infiniband_np_cnp_packets_sent_total": _PORT,
    "node_infiniband_rp_cnp_packets_handled_total": _PORT,
    "node_infiniband_np_ecn_marked_roce_packets_received_total": _PORT,
    "node_infiniband_out_of_sequence_packets_received_total": _PORT,
    "node_infiniband_packet_sequence_errors_total": _PORT,
    "node_infiniband_local_ack_timeout_errors_total": _PORT,
    "node_infiniband_roce_adp_retransmits_total": _PORT,
    "node_network_speed_bytes": _DEVICE,
    "node_network_carrier": _DEVICE,
    "node_network_carrier_changes_total": _DEVICE,
    "node_network_receive_errs_total": _DEVICE,
    "node_network_transmit_errs_total": _DEVICE,
    "node_network_receive_drop_total": _DEVICE,
    "node_network_transmit_drop_total": _DEVICE,
    "node_netstat_Tcp_RetransSegs": _NODE,
    "paceline_device_pcie_width": _DEVICE_KIND,
    "paceline_device_pcie_width_max": _DEVICE_KIND,
    "paceline_device_pcie_transfers_per_second": _DEVICE_KIND,
    "paceline_device_pcie_transfers_per_second_max": _DEVICE_KIND,
    "paceline_kernel_events_total": ("kind", "code", "device"),
    "paceline_kernel_log_lost_total": _NODE,
    "paceline_kernel_xid_info": ("xid", "meaning"),
    "paceline_rank_kernel_events_total": (*_RANK, "kind"),
    "paceline_rank_numa_misbound": _RANK,
    "paceline_rank_memory_misbound": _RANK,
    "paceline_rank_nic_misplaced": _RANK,
    "paceline_rank_process_run_queue_wait_seconds_total": _RANK,
    "paceline_rank_process_major_faults_total": _RANK,
    "paceline_rank_process_context_switches_total": (*_RANK, "kind"),
    "node_pressure_cpu_waiting_seconds_total": _NODE,
    "node_pressure_memory_waiting_seconds_total": _NODE,
    "node_pressure_io_waiting_seconds_total": _NODE,
    "node_context_switches_total": _NODE,
    "node_memory_MemAvailable_bytes": _NODE,
    "node_memory_MemTotal_bytes": _NODE,
    "node_vmstat_pgmajfault": _NODE,
    "node_vmstat_pswpin": _NODE,
    "node_vmstat_pswpout": _NODE,
    "node_disk_io_time_seconds_total": _DEVICE,
    "node_disk_io_time_weighted_seconds_total": _DEVICE,
    "node_filesystem_avail_bytes": ("mountpoint",),
    "node_filesystem_size_bytes": ("mountpoint",),
}
POINTS_PER_SERIES = 64
# Older samples are this far apart, the oldest several times that: a rank that is slow for ten
# minutes can still be compared with its healthy past.
COARSE_NS = 10e9
FORGOTTEN_NS = 1200e9
SERIES_PER_NODE = 1536  # a node of 8 GPUs, 10 ports and 16 disks has 600

Labels = tuple[str | None, ...]  # the values of those labels


class MetricSeries:
    """One metric of one thing, oldest first."""

    __slots__ = ("_flat",)

    def __init__(self) -> None:
        # time, value, time, value, ...: one buffer. A double holds today's nanoseconds to 256 ns.
        self._flat = array("d")

    def add(self, time_ns: int, value: float) -> None:
        flat, at = self._flat, float(time_ns)
        if flat and at <= flat[-2]:
            self._insert(at, value)
        elif len(flat) >= 4 and flat[-1] == value == flat[-3]:
            flat[-2] = at  # it holds on
        else:
            flat.append(at)
            flat.append(value)
            if len(flat) > 2 * POINTS_PER_SERIES:
                self._thin()

    def _insert(self, at: float, value: float) -> None:
        """A sample that was delivered late, or twice."""
        flat = self._flat
        index = len(flat)
        while index and flat[index - 2] > at:
            index -= 2
        if index and flat[index - 2] == at:
            return
        held = 0 < index < len(flat) and flat[index - 1] == value == flat[index + 1]
        if not held:
            flat.insert(index, value)
            flat.insert(index, at)
            if len(flat) > 2 * POINTS_PER_SERIES:
                self._thin()

    def _thin(self) -> None:
        """Of the older half, keep what is far enough apart: the older, the farther."""
        flat = self._flat
        half = len(flat) // 4 * 2
        oldest_ns = flat[-2] - FORGOTTEN_NS
        kept = array("d")
        for index in range(0, half, 2):
            at = flat[index]
            if at >= oldest_ns and (not kept or at - kept[-2] >= COARSE_NS):
                kept.extend(flat[index : index + 2])
        if len(kept) > half * 3 // 4:
            older = len(kept) // 4 * 2
            kept = array("d", _every_second(kept[:older])) + kept[older:]
        flat[:half] = kept

    def __len__(self) -> int:
        return len(self._flat) // 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(time_ns, value), oldest first."""
        return list(zip(self._flat[::2], self._flat[1::2], strict=True))

    def columns(self) -> tuple[Floats, Floats]:
        """Times and values, as copies."""
        flat = np.array(self._flat)
        return flat[::2], flat[1::2]

    def latest(self) -> float | None:
        return self._flat[-1] if self._flat else None

    def latest_ns(self) -> float | None:
        return self._flat[-2] if self._flat else None

    def typical_before(self, time_ns: int) -> float | None:
        """What it was for half of the time before."""
        times, values = self.columns()
        return typical(times[times < time_ns], values[times < time_ns])

    def typical_since(self, time_ns: int) -> float | None:
        """The same since then; the newest value where nothing was measured since."""
        times, values = self.columns()
        since = typical(times[times >= time_ns], values[times >= time_ns])
        return self.latest() if since is None else since

    def rate_since(self, time_ns: int) -> float | None:
        """Growth per second of a counter between its last value before then and its newest."""
        times, values = self.columns()
        first = max(int(np.searchsorted(times, time_ns)) - 1, 0)
        return _rate(times[first:], values[first:])

    def rate_before(self, time_ns: int) -> float | None:
        times, values = self.columns()
        end = int(np.searchsorted(times, time_ns))
        return _rate(times[:end], values[:end])


def _every_second(flat: array[float]) -> Iterator[float]:
    for index in range(0, len(flat), 4):
        yield from flat[index : index + 2]


def typical(times: Floats, values: Floats) -> float | None:
    """The median over time: a sample counts for as long as it is from its neighbours."""
    if times.size < 2:
        return float(values[0]) if times.size else None
    middles = (times[1:] + times[:-1]) / 2
    edges = np.concatenate((times[:1], middles, times[-1:]))
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(np.diff(edges)[order])
    return float(values[order[np.searchsorted(passed, passed[-1] / 2)]])


def without_dips(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """A counter that read less once and then goes on where it was had no reset: a bad reading.

    Taken for one, all it ever counted would be growth.
    """
    if values.size < 3:
        return times, values
    fell = values[1:-1] < values[:-2]
    good = np.ones(values.size, dtype=np.bool_)
    good[1:-1] = ~(fell & (values[2:] >= values[:-2]))
    return times[good], values[good]


def _rate(times: Floats, values: Floats) -> float | None:
    """None where there is no time between, or where all that happened is a reset to zero."""
    times, values = without_dips(times, values)
    if times.size < 2 or times[-1] <= times[0]:
        return None
    grown = np.diff(values)
    if (grown < 0).any() and not (grown > 0).any():
        return None
    return float(grown[grown > 0].sum() / (times[-1] - times[0]) * 1e9)


@dataclass(slots=True)
class _Node:
    """By metric, then by the values of its labels."""

    metrics: dict[str, dict[Labels, MetricSeries]] = field(default_factory=dict)
    series: int = 0


class Telemetry:
    """Samples of all nodes that hold ranks of the job, or could."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        # One copy of each tuple of labels, however many series have it.
        self._labels: dict[Labels, Labels] = {}

    def add(self, node: str, sample: Sample, clock_shift_ns: int = 0) -> None:
        self.extend(node, (sample,), clock_shift_ns)

    def extend(self, node: str, samples: Iterable[Sample], clock_shift_ns: int = 0) -> None:
        """Every sample of every node passes through here."""
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = _Node()
        metrics = known.metrics
        for sample in samples:
            name = sample.name
            names = KEPT.get(name)
            if names is None:
                continue
            of_metric = metrics.get(name)
            if of_metric is None:
                of_metric = metrics[name] = {}
            key: Labels = tuple(map(sample.labels.get, names))
            series = of_metric.get(key)
            if series is None:
                if known.series >= SERIES_PER_NODE:
                    continue
                known.series += 1
                series = of_metric[self._labels.setdefault(key, key)] = MetricSeries()
            series.add(sample.time_ns + clock_shift_ns, sample.value)

    def find(self, node: str, name: str, **labels: str) -> MetricSeries | None:
        """The series with exactly these labels (of those that are kept)."""
        known = self._nodes.get(node)
        names = KEPT.get(name)
        if known is None or names is None or not labels.keys() <= set(names):
            return None
        return known.metrics.get(name, {}).get(tuple([labels.get(each) for each in names]))

    def latest(self, node: str, name: str, **labels: str) -> float | None:
        series = self.find(node, name, **labels)
        return None if series is None else series.latest()

    def all_of(
        self, node: str, name: str, **labels: str
    ) -> Iterator[tuple[dict[str, str], MetricSeries]]:
        """Every series of one metric of a node that has these labels, with all its labels."""
        known = self._nodes.get(node)
        if known is None:
            return
        for key, series in known.metrics.get(name, {}).items():
            values = zip(KEPT[name], key, strict=True)
            found = {each: value for each, value in values if value is not None}
            if labels.items() <= found.items():
                yield found, series

    def throttle_reasons(self, node: str, gpu: int) -> dict[str, MetricSeries]:
        """Reason -> its 0/1 series, for one GPU."""
        found = self.all_of(node, "paceline_gpu_throttle_reason", gpu=str(gpu))
        return {labels["reason"]: series for labels, series in found if "reason" in labels}
