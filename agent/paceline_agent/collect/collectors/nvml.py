"""GPUs through NVML: clocks, throttling, power, memory, errors, links, processes, XIDs.

Names and units are those of NVIDIA's dcgm-exporter if it has the metric. A value that a GPU does
not support is read once and then left out. A GPU that is lost or does not respond causes one event;
only its own samples are missing. Runs isolated: on a faulty GPU a call can block in the driver for
minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec

from paceline_agent.collect.blocks import Recurring, SeriesBlock
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.nvml import fields, instances, readings
from paceline_agent.collect.nvml.activity import Activity
from paceline_agent.collect.nvml.driver import (
    GONE,
    address,
    optional,
    pynvml,
    succeeds,
    text,
    versions,
)
from paceline_agent.collect.nvml.fields import FieldReading
from paceline_agent.collect.nvml.gpu import NvmlGpu, Trouble, Value
from paceline_agent.collect.nvml.links import Links
from paceline_agent.collect.nvml.metrics import METRICS
from paceline_agent.collect.nvml.occupants import Occupants, gpu_of_pid
from paceline_agent.collect.nvml.watch import Watch
from paceline_wire import metric_names
from paceline_wire.batch import CollectorEvent, DeviceEvent, GpuInfo, Sample

_SECOND_NS = 1_000_000_000
_SLOW_NS = 10 * _SECOND_NS  # period of slow reads: links, row remapping, processes, limits
# While a GPU is lost: some return only after a new initialization. Doubled each time, because
# without persistence mode a new initialization can cost the other GPUs a sweep.
_REOPEN_NS = 60 * _SECOND_NS
_REOPEN_AT_MOST_NS = 3600 * _SECOND_NS
_XIDS_AT_MOST = 64  # per sweep
# A driver that is busy with another GPU may not respond for seconds; that is not yet a failure.
_HUNG_NS = 10 * _SECOND_NS
_EVENTS = "events"
_TROUBLES = ("lost", "hung")

# A GPU that does not respond within a second is skipped. With the time for the others this stays
# below the deadline, however many GPUs hang.
_PATIENCE_SECONDS = 1.0
_BUDGET_SECONDS = 1.5


class NvmlCollector(Collector):
    name: ClassVar[str] = "nvml"
    interval_seconds: ClassVar[float] = 1.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS
    deadline_seconds: ClassVar[float] = 3.5
    series_at_most: ClassVar[int] = 4000  # 8 GPUs of 18 links each have 1,800
    isolated: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._gpus: list[NvmlGpu] = []
        self._most_gpus = 0
        self._versions: dict[str, str] = {}
        self._events: Any = None
        self._opened = False
        self._reopen_ns = 0
        self._reopen_pause_ns = _REOPEN_NS
        self._slow_ns: int | None = None
        self._troubles = Recurring()
        self._watch = Watch(_PATIENCE_SECONDS, _BUDGET_SECONDS)

    def collect(self, now_ns: int) -> Collected:
        if not self._opened:
            self._open(now_ns)
        elif self._should_reopen(now_ns):
            self._reopen_pause_ns = min(2 * self._reopen_pause_ns, _REOPEN_AT_MOST_NS)
            self._reopen(now_ns)
        is_slow = self._slow_ns is None or abs(now_ns - self._slow_ns) >= _SLOW_NS
        answers = self._ask(is_slow, now_ns)
        if self._is_newly_gone(answers):
            self._reopen(now_ns)  # all GPUs failed, so the driver itself did
            answers = self._ask(is_slow, now_ns)
        if is_slow:
            self._slow_ns = now_ns
        stuck = self._watch.stuck
        if self._ours() and stuck.issuperset(self._ours()):
            # nothing to report: block, so that the runner notices that the collector hangs
            self._watch.wait()
            stuck = set()
        return self._collected(answers, stuck, is_slow, now_ns)

    def close(self) -> None:
        if self._opened:
            self._opened = False
            pynvml.nvmlShutdown()

    def _open(self, now_ns: int) -> None:
        if pynvml is None:
            raise CollectorUnavailable("pynvml is not installed: pip install 'paceline[agent]'")
        try:
            pynvml.nvmlInit()
            self._opened = True
            self._versions = versions()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise CollectorUnavailable(f"no usable NVIDIA driver: {error}") from error
        self._reopen_ns = now_ns + self._reopen_pause_ns
        self._slow_ns = None
        known = {gpu.index: gpu for gpu in self._gpus}
        self._most_gpus = max(count, self._most_gpus)
        self._gpus = [known.get(index) or _gpu(index) for index in range(count)]
        for gpu in self._gpus:
            gpu.handle = None
            gpu.is_ours = True
            gpu.forget_refusals()
        self._events = optional(pynvml.nvmlEventSetCreate)

    def _reopen(self, now_ns: int) -> None:
        """Initialize NVML again, but never while a call is in progress in the driver."""
        if not self._watch.stuck:
            optional(self.close)
            self._open(now_ns)

    def _should_reopen(self, now_ns: int) -> bool:
        some_vanished = len(self._gpus) < self._most_gpus  # the driver may renumber them
        if not some_vanished and all(gpu.trouble != "lost" for gpu in self._gpus):
            self._reopen_pause_ns = _REOPEN_NS
            self._reopen_ns = now_ns + _REOPEN_NS
        return now_ns >= self._reopen_ns

    def _is_newly_gone(self, answers: dict[Any, Any]) -> bool:
        """Return whether all GPUs are gone now and were not gone for long."""
        return any(gpu.trouble is None for gpu in self._ours()) and all(
            isinstance(answers.get(gpu), Exception) for gpu in self._ours()
        )

    def _ours(self) -> list[NvmlGpu]:
        return [gpu for gpu in self._gpus if gpu.is_ours]

    def _ask(self, is_slow: bool, now_ns: int) -> dict[Any, Any]:
        jobs: dict[Any, Callable[[], Any]] = {
            gpu: partial(self._read, gpu, is_slow, now_ns) for gpu in self._gpus if gpu.is_ours
        }
        if self._events is not None:
            jobs[_EVENTS] = self._xids
        return self._watch.run(jobs)

    def _read(
        self, gpu: NvmlGpu, is_slow: bool, now_ns: int
    ) -> tuple[list[SeriesBlock], list[SeriesBlock]]:
        """Return a GPU's samples and its lasting samples.

        Raises NVMLError if it does not respond.
        """
        if gpu.handle is None:
            self._identify(gpu)
        if not gpu.is_ours:
            return [], []
        gpu.begin()
        values: list[Value | FieldReading] = [*gpu.read(readings.EACH_SWEEP)]
        values += gpu.ask(gpu.fast_fields) or ()
        if not gpu.answered and gpu.last_error is not None:
            raise gpu.last_error
        lasting = [gpu.block(gpu.lasting, self._seldom(gpu), now_ns)] if is_slow else []
        values += _xid_values(gpu)
        if gpu.occupants is not None:
            values += gpu.occupants.shared(gpu, self._gpus)
        return [gpu.block(gpu.recurring, values, now_ns)], lasting

    def _seldom(self, gpu: NvmlGpu) -> list[Value | FieldReading]:
        values: list[Value | FieldReading] = [*instances.read(gpu)]
        values += gpu.read(readings.SELDOM)
        values += gpu.ask(gpu.slow_fields) or ()
        gpu.links = gpu.links or Links()
        values += gpu.links.read(gpu)
        gpu.info = gpu.info and msgspec.structs.replace(gpu.info, nvlinks=gpu.links.ends)
        gpu.activity = gpu.activity or Activity()
        values += gpu.activity.read(gpu)
        gpu.occupants = gpu.occupants or Occupants()
        values += gpu.occupants.read(gpu, self.context.local_ranks(), self.context.procfs_root)
        return values

    def _identify(self, gpu: NvmlGpu) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
        except pynvml.NVMLError_NoPermission:
            gpu.is_ours = False
            return
        name, uuid = text(pynvml.nvmlDeviceGetName, handle), text(pynvml.nvmlDeviceGetUUID, handle)
        pci_bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
        if isinstance(pci_bus_id, bytes):
            pci_bus_id = pci_bus_id.decode(errors="replace")
        gpu.name(
            GpuInfo(index=gpu.index, uuid=uuid, name=name, pci_bus_id=pci_bus_id),
            self.context.hostname,
        )
        gpu.handle = handle
        if self._events is not None:
            register = pynvml.nvmlDeviceRegisterEvents
            xid = pynvml.nvmlEventTypeXidCriticalError
            gpu.reports_xids = succeeds(lambda: register(handle, xid, self._events))
        gpu.info = gpu.info and msgspec.structs.replace(gpu.info, reports_xids=gpu.reports_xids)

    def _xids(self) -> list[tuple[NvmlGpu, int]]:
        """Return every XID since the last sweep, repeats included."""
        found: list[tuple[NvmlGpu, int]] = []
        by_handle = {address(gpu.handle): gpu for gpu in self._gpus if gpu.handle is not None}
        while len(found) < _XIDS_AT_MOST:
            event = optional(lambda: pynvml.nvmlEventSetWait(self._events, 0))
            if event is None:  # no more events, or a lost GPU, which is reported separately
                break
            gpu = by_handle.get(address(event.device))
            if gpu is not None:
                found.append((gpu, int(event.eventData)))
        return found

    def _collected(
        self, answers: dict[Any, Any], stuck: set[Any], is_slow: bool, now_ns: int
    ) -> Collected:
        samples: list[Sample | SeriesBlock] = []
        lasting: list[Sample | SeriesBlock] = [
            Sample(metric_names.DRIVER_INFO, self._versions, 1.0, now_ns)
        ]
        events: list[DeviceEvent | CollectorEvent] = []
        for gpu in self._ours():
            answer = answers.get(gpu)
            if isinstance(answer, tuple):
                samples += answer[0]
                lasting += answer[1]
            elif answer is not None and not isinstance(answer, pynvml.NVMLError):
                raise answer
            news = _events_of(gpu, answer, gpu in stuck, now_ns)
            events += news
            if news:
                self._slow_ns = None  # the lasting values change with the next sweep
        samples.append(self._in_trouble(now_ns))
        for gpu, xid in answers.get(_EVENTS) or ():
            gpu.last_xid = xid
            gpu.xid_counts[xid] = gpu.xid_counts.get(xid, 0) + 1
            events.append(gpu.event("xid", f"XID {xid}", now_ns))
        return Collected(
            samples=samples,
            lasting=lasting if is_slow else None,
            events=events,
            gpus=[info for gpu in self._ours() if (info := _gpu_info(gpu, now_ns)) is not None],
            gpu_of_pid=gpu_of_pid(self._ours()) if is_slow else None,
        )

    def _in_trouble(self, now_ns: int) -> SeriesBlock:
        asked = [(gpu.index, trouble) for gpu in self._ours() for trouble in _TROUBLES]
        return self._troubles.block(
            asked,
            lambda: [(f"paceline_gpu_{trouble}", {"gpu": str(gpu)}) for gpu, trouble in asked],
            [float(gpu.trouble == trouble) for gpu in self._ours() for trouble in _TROUBLES],
            now_ns,
        )


def _gpu(index: int) -> NvmlGpu:
    return NvmlGpu(index, fields.Fields(fields.FAST), fields.Fields(fields.SLOW))


def _gpu_info(gpu: NvmlGpu, now_ns: int) -> GpuInfo | None:
    """Return the GPU's description for the server; None before its first response."""
    hung = gpu.trouble == "hung" and now_ns - gpu.troubled_ns >= _HUNG_NS
    if gpu.trouble != "lost" and not hung:
        return gpu.info
    info = gpu.info or GpuInfo(index=gpu.index, uuid="", name="", pci_bus_id="")
    return msgspec.structs.replace(info, trouble=gpu.trouble)


def _xid_values(gpu: NvmlGpu) -> list[Value]:
    values = [
        Value(metric_names.GPU_XID_ERRORS_COUNT, count, (("xid", str(xid)),))
        for xid, count in gpu.xid_counts.items()
    ]
    if gpu.last_xid is not None or gpu.reports_xids:  # otherwise it is unknown
        values.append(Value(metric_names.GPU_XID_ERRORS, gpu.last_xid or 0))
    return values


def _events_of(
    gpu: NvmlGpu, answer: Any, is_stuck: bool, now_ns: int
) -> list[DeviceEvent | CollectorEvent]:
    """Return the events of a state change of a GPU; a hung GPU counts as partial quarantine.

    An error that does not say that the GPU is gone changes nothing: its values are only missing.
    """
    trouble: Trouble | None = "lost" if isinstance(answer, GONE) else "hung" if is_stuck else None
    is_unknown = answer is None or (isinstance(answer, Exception) and trouble is None)
    # None: it has just responded again, and the next sweep reports it
    if is_unknown and not is_stuck:
        trouble = gpu.trouble
    before, gpu.trouble = gpu.trouble, trouble
    if trouble == before:
        return []
    gpu.troubled_ns = now_ns
    events: list[DeviceEvent | CollectorEvent] = []
    if before == "hung":
        events.append(_of_collector("recovered", f"gpu{gpu.index} answers again", now_ns))
    if trouble is None:
        events.append(gpu.event("gpu_back", f"was {before}, answers again", now_ns))
    elif trouble == "lost":
        events.append(gpu.event("gpu_lost", str(answer), now_ns))
    else:
        detail = f"gpu{gpu.index} does not answer; the others are read on"
        events.append(gpu.event("gpu_hung", "does not answer", now_ns))
        events.append(_of_collector("quarantined", detail, now_ns))
    return events


def _of_collector(kind: str, detail: str, now_ns: int) -> CollectorEvent:
    return CollectorEvent(time_ns=now_ns, collector=NvmlCollector.name, kind=kind, detail=detail)
