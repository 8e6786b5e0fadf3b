"""Counts of kernel events, and when repeats are reported.

The first event of each sort is reported immediately. Repeats are counted and reported together, at
most once a minute: a card that floods the log must not flood the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.gpus import gpu_labels
from paceline_agent.collect.kernel_log.recognize import KernelEvent, pci_address
from paceline_agent.collect.kernel_log.xids import explain
from paceline_wire import metric_names
from paceline_wire.batch import OF_ANOTHER_PROCESS, DeviceEvent, GpuInfo, Sample

REPEAT_SECONDS = 60.0
SORTS_AT_MOST = 256  # limits the series of a faulty node
EVENTS_AT_MOST = 64  # per sweep
OTHER = "other"
_OF_A_PROCESS = ("oom_kill", "segfault", "memory_failure")  # each process is a separate event

Key = tuple[str, str, str]  # kind, code, device


@dataclass(slots=True)
class _EventSort:
    """The events of one sort: when they were last reported, and those since then."""

    at_seconds: float | None = None
    repeats: int = 0
    newest: tuple[KernelEvent, int] | None = None  # with its time


def _is_due(sort_state: _EventSort, now_seconds: float) -> bool:
    """Return whether repeats are due; the clock of a log of several boots may go back."""
    return (
        sort_state.at_seconds is None or abs(now_seconds - sort_state.at_seconds) >= REPEAT_SECONDS
    )


class KernelEventCounts:
    """Counts by kind, code and device; `name_of` returns gpu3 for 0000:9b:00.0."""

    def __init__(
        self, name_of: Callable[[str], str] = str, *, events_at_most: int = EVENTS_AT_MOST
    ) -> None:
        self._name_of = name_of
        self._events_at_most = events_at_most
        self._counts: dict[Key, int] = {}
        self._last_xid: dict[str, int] = {}  # by PCI address
        self._of_ranks: dict[tuple[str, str, str], int] = {}  # job, rank, kind
        self._xids_of_processes: dict[tuple[Key, LocalRank | None], int] = {}  # None: of no rank
        self._sorts: dict[tuple[str, ...], _EventSort] = {}
        self._events: list[DeviceEvent] = []

    def take(
        self,
        event: KernelEvent,
        time_ns: int,
        now_seconds: float,
        *,
        rank: LocalRank | None = None,
        is_foreign: bool = False,
        alert: bool = True,
    ) -> None:
        """Count an event; without `alert` (an old message) it is not reported.

        Args:
            event: The event.
            time_ns: Its time.
            now_seconds: Time of the log.
            rank: The rank whose process it names.
            is_foreign: It names a process that belongs to no rank of this node.
            alert: Report it.
        """
        key = (event.kind, event.code, event.device)
        if key not in self._counts and len(self._counts) >= SORTS_AT_MOST:
            key = (event.kind, OTHER, OTHER)
        self._counts[key] = self._counts.get(key, 0) + event.count
        if _is_xid(event.kind, key[1]):
            self._last_xid[event.device] = int(event.code)
            if rank is not None or is_foreign:
                owner = (key, rank)
                known = self._xids_of_processes
                if owner in known or len(known) < SORTS_AT_MOST:
                    known[owner] = known.get(owner, 0) + event.count
        if rank is not None:
            of_rank = (rank.job, str(rank.rank), event.kind)
            if of_rank in self._of_ranks or len(self._of_ranks) < SORTS_AT_MOST:
                self._of_ranks[of_rank] = self._of_ranks.get(of_rank, 0) + event.count
        if alert:
            whose = f" [rank {rank.rank} of {rank.job}]" if rank is not None else ""
            if is_foreign:
                whose = f" {OF_ANOTHER_PROCESS}"
            self._tell(key, event, time_ns, now_seconds, whose)

    def _tell(self, key: Key, event: KernelEvent, time_ns: int, now: float, whose: str) -> None:
        sort: tuple[str, ...] = (*key, whose) if event.kind == "xid" else key
        if event.kind in _OF_A_PROCESS:
            sort = (*key, str(event.pid))
        if sort not in self._sorts and len(self._sorts) >= SORTS_AT_MOST:
            self._sorts.pop(next(iter(self._sorts)))
        sort_state = self._sorts.setdefault(sort, _EventSort())
        if not _is_due(sort_state, now) or len(self._events) >= self._events_at_most:
            sort_state.repeats += event.count
            sort_state.newest = (event, time_ns)
            return
        self._say(sort_state, event, time_ns, now, sort_state.repeats, whose)

    def _say(
        self,
        sort_state: _EventSort,
        event: KernelEvent,
        time_ns: int,
        now: float,
        repeats: int,
        whose: str = "",
    ) -> None:
        more = f" ({repeats} more since the last report)" if repeats else ""
        sort_state.at_seconds, sort_state.repeats, sort_state.newest = now, 0, None
        self._events.append(
            DeviceEvent(
                time_ns=time_ns,
                kind=event.kind,
                device=self._name_of(event.device),
                detail=f"{event.severity}: {event.detail}{whose}{more}",
            )
        )

    def events(self, now_seconds: float) -> list[DeviceEvent]:
        """Return the events to report now, with the repeats that are due."""
        for sort_state in self._sorts.values():
            if sort_state.newest is None or len(self._events) >= self._events_at_most:
                continue
            if _is_due(sort_state, now_seconds):
                event, time_ns = sort_state.newest
                self._say(sort_state, event, time_ns, now_seconds, sort_state.repeats - event.count)
        events, self._events = self._events, []
        return events

    def samples(
        self, now_ns: int, gpus: Sequence[GpuInfo] = (), hostname: str = ""
    ) -> Iterator[Sample]:
        """Yield the counts, and the XIDs of those GPUs whose XIDs NVML does not report."""
        known = {pci_address(gpu.pci_bus_id) for gpu in gpus}
        for gpu in gpus:
            if not gpu.reports_xids:
                yield from self._xids_of(gpu, hostname, now_ns)
        for (kind, code, device), count in self._counts.items():
            labels = {"kind": kind, "code": code, "device": self._name_of(device)}
            yield Sample(metric_names.KERNEL_EVENTS_TOTAL, labels, float(count), now_ns)
            if _is_xid(kind, code) and device not in known:
                # NVML counts XIDs of the GPUs it lists; for a lost GPU the log is the only source
                address = {"pci_bus_id": f"0000{device.upper()}", "xid": code}
                yield Sample(metric_names.GPU_XID_ERRORS_COUNT, address, float(count), now_ns)
        for number in sorted({int(code) for kind, code, _ in self._counts if _is_xid(kind, code)}):
            xid = explain(number)
            labels = {"xid": str(number), "meaning": xid.meaning, "severity": xid.severity}
            labels |= {"action": xid.action, "advice": xid.advice}
            yield Sample(metric_names.KERNEL_XID_INFO, labels, 1.0, now_ns)
        for (key, owner), count in self._xids_of_processes.items():
            labels = {"code": key[1], "device": self._name_of(key[2])}
            if owner is not None:
                labels["owner"] = f"{owner.job}/{owner.rank}"
            yield Sample(metric_names.KERNEL_PROCESS_XIDS_TOTAL, labels, float(count), now_ns)
        for (job, rank, kind), count in self._of_ranks.items():
            labels = {"job": job, "rank": rank, "kind": kind}
            yield Sample(metric_names.RANK_KERNEL_EVENTS_TOTAL, labels, float(count), now_ns)

    def _xids_of(self, gpu: GpuInfo, hostname: str, now_ns: int) -> Iterator[Sample]:
        address = pci_address(gpu.pci_bus_id)
        labels = gpu_labels(gpu, hostname)
        last = float(self._last_xid.get(address, 0))
        yield Sample(metric_names.GPU_XID_ERRORS, labels, last, now_ns)
        for (kind, code, device), count in self._counts.items():
            if _is_xid(kind, code) and device == address:
                counted = {**labels, "xid": code}
                yield Sample(metric_names.GPU_XID_ERRORS_COUNT, counted, float(count), now_ns)


def _is_xid(kind: str, code: str) -> bool:
    return kind == "xid" and code != OTHER
