"""Timing on a CUDA device with pooled events that are polled later and never waited for.

A timed block records one event on the device's current stream at its start and one at its end. At
later step boundaries, pairs that the device has completed become records; the rest stay queued.

Device time is mapped to the host's clock through an anchor: an event whose host time is known.
Each step sets a new anchor, computed from the previous one, because CUDA returns elapsed
milliseconds as float32 and long intervals would lose precision. The host observes that an event
was recorded after T0 and had passed by T1; both bounds limit the drift.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import Any, Protocol, SupportsFloat

from paceline.recorder import Recorder
from paceline.sections import Transfer
from paceline.writer import Pipelining, Section
from paceline.writer.interface import NO_CHUNK, NO_MICROBATCH, DeviceRow, Event
from paceline_wire.spans import NONE_32, Flag, Op

MAXIMUM_QUEUED = 1 << 14  # pairs that the device has not completed yet
DEVICE_BITS = Flag.DEVICE << 48


class Cuda(Protocol):
    """The part of `torch.cuda` that the hooks use."""

    def Event(self, *, enable_timing: bool) -> Any: ...  # noqa: N802

    def is_current_stream_capturing(self) -> bool: ...

    def current_stream(self, device: int) -> Any: ...


class DeviceTimer:
    """The events of one process's device, and the records that wait for them.

    It synchronizes with the device only once, when it is created, before the first step it
    measures.
    """

    def __init__(self, cuda: Cuda, recorder: Recorder, device: int) -> None:
        """`device`: index, see `cuda.device_in_use`."""
        self._cuda = cuda
        self._recorder = recorder
        self._device = device
        self._free: list[Event] = []
        self._queue: deque[DeviceRow] = deque()
        self._reports: deque[tuple[Event, int, tuple[SupportsFloat | None, ...]]] = deque()
        self._next_anchor: tuple[Event, int] | None = None
        self.dropped = 0  # pairs beyond MAXIMUM_QUEUED
        self._anchor: Event = cuda.Event(enable_timing=True)
        self._anchor.record(cuda.current_stream(device))
        self._anchor.synchronize()
        self._anchor_ns = perf_counter_ns()

    @property
    def anchor(self) -> tuple[Any, int]:
        """The newest event whose time on the host's clock is known, and that time (ns)."""
        return self._anchor, self._anchor_ns

    def mark(self) -> Event | None:
        """Record an event on the device's current stream; None while a CUDA graph is captured."""
        if self._cuda.is_current_stream_capturing():
            return None
        event: Event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def release(self, event: Event) -> None:
        """Return an event that is not needed to the pool."""
        self._free.append(event)

    def enqueue(self, row: DeviceRow) -> None:
        """Write a record once the device has completed both events."""
        if len(self._queue) >= MAXIMUM_QUEUED:
            self.dropped += 1
            self._free += row[5:]
        else:
            self._queue.append(row)

    def report(self, values: tuple[Any, ...]) -> None:
        """Copy values that may be on the device without waiting; publish them when they arrive."""
        copies = tuple(
            value.detach().to("cpu", non_blocking=True) if on_device(value) else value
            for value in values
        )
        event = self.mark()
        if event is not None:
            self._reports.append((event, self._recorder.step, copies))

    def resolve(self) -> None:
        """Write the records of completed events and renew the anchor; called at a step boundary."""
        self._renew_anchor()
        queue = self._queue
        while queue and queue[0][6].query():
            *words, started, ended = queue.popleft()
            start_ns = self._host_ns(started)
            duration_ns = max(0, int(started.elapsed_time(ended) * 1e6))
            word1, word2, peer, size, sequence = words
            word1 |= DEVICE_BITS
            self._recorder.write(word1, word2, peer, size, sequence, start_ns, duration_ns)
            self._free += (started, ended)
        while self._reports and self._reports[0][0].query():
            event, step, values = self._reports.popleft()
            self._recorder.report(step, *values)
            self._free.append(event)

    def _host_ns(self, event: Event) -> int:
        return self._anchor_ns + int(self._anchor.elapsed_time(event) * 1e6)

    def _renew_anchor(self) -> None:
        if self._next_anchor is not None and self._next_anchor[0].query():
            event, earliest_ns = self._next_anchor
            host_ns = min(max(self._host_ns(event), earliest_ns), perf_counter_ns())
            self._free.append(self._anchor)
            self._anchor, self._anchor_ns = event, host_ns
            self._next_anchor = None
        if self._next_anchor is None:
            now = perf_counter_ns()
            event_or_none = self.mark()
            if event_or_none is not None:
                self._next_anchor = (event_or_none, now)


class DeviceSection(Section):
    """A section measured by device events; the state page still shows the host's time."""

    __slots__ = ("started", "timer")

    def __init__(self, recorder: Recorder, op: int, timer: DeviceTimer) -> None:
        super().__init__(recorder, op)
        self.timer = timer
        self.started: list[Event | None] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.started.append(self.timer.mark())

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        started, ended = self.started.pop(), self.timer.mark()
        if started is None or ended is None:
            super().__exit__(kind, error, trace)
            return
        recorder = self.recorder
        word1 = self.op | recorder.chunk << 32
        self.timer.enqueue((word1, recorder.word2, NONE_32, 0, 0, started, ended))
        self.close()


class DeviceForward:
    """The recognized forward pass, measured by device events.

    The same three methods as those of the writer, which measures it on the host.
    """

    def __init__(self, recorder: Recorder, timer: DeviceTimer) -> None:
        self._recorder = recorder
        self._timer = timer
        self._started_ns = 0  # on the host
        self._started: Event | None = None

    def begin_forward(self) -> None:
        """Start a forward pass, or start it again."""
        self.drop_forward()
        self._started = self._timer.mark()
        self._started_ns = perf_counter_ns()

    def end_forward(self) -> None:
        """Record the forward pass, if it began in this step."""
        started, recorder = self._started, self._recorder
        if started is None or self._started_ns < recorder.step_started_ns:
            self.drop_forward()
            return
        self._started = None
        if (ended := self._timer.mark()) is not None:
            word1, word2 = Op.FORWARD | NO_CHUNK << 32, recorder.step | NO_MICROBATCH
            self._timer.enqueue((word1, word2, NONE_32, 0, 0, started, ended))

    def drop_forward(self) -> None:
        """Forget the forward pass: there was none."""
        if self._started is not None:
            self._timer.release(self._started)
            self._started = None


class DevicePipelining(Pipelining):
    """A pipeline action measured by device events."""

    def __init__(
        self,
        recorder: Recorder,
        op: int,
        microbatch: int | None,
        chunk: int,
        peer: int | None,
        timer: DeviceTimer,
    ) -> None:
        super().__init__(recorder, op, microbatch, chunk, peer)
        self.timer = timer
        self.started: list[Event | None] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.started.append(self.timer.mark())

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        started, ended = self.started.pop(), self.timer.mark()
        if started is None or ended is None or self._has_transfers_in_flight():
            super().__exit__(kind, error, trace)
            return
        word1, word2 = self.op | self.chunk << 32, self.recorder.word2
        self.timer.enqueue((word1, word2, self.peer, self.size, self.sequence, started, ended))
        self.close()

    def _has_transfers_in_flight(self) -> bool:
        return False


class DeviceTransfer(DevicePipelining, Transfer):
    """A sending or receiving action measured by device events."""

    def _has_transfers_in_flight(self) -> bool:
        return self.is_in_flight


def on_device(value: object) -> bool:
    """Return whether the value is a CUDA tensor, or nested lists that begin with one."""
    while isinstance(value, list | tuple):
        value = value[0] if value else None
    return bool(getattr(value, "is_cuda", False))
