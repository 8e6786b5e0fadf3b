"""Timing on a CUDA device: pooled events, looked at later, never waited for.

An event is recorded on the current stream where a span begins and where it ends. At later step
boundaries the pairs that the device has passed are turned into records; the rest stay queued.
Device time is mapped to the host's clock by an anchor: an event whose host time is known. Each
step sets a new anchor, computed from the one before, so that the milliseconds CUDA answers in
float32 stay small; what the host saw (recorded after T0, passed by T1) bounds the drift.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import Any, Protocol, SupportsFloat

from paceline.recorder import Recorder
from paceline.writer import Pipelining, Section
from paceline.writer.sections import Transfer
from paceline_wire.spans import NONE_32, Flag

MAXIMUM_QUEUED = 1 << 14  # pairs the device has not passed yet
DEVICE_BITS = Flag.DEVICE << 48


class Event(Protocol):
    """The part of `torch.cuda.Event` used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class Cuda(Protocol):
    """The part of `torch.cuda` used here."""

    def Event(self, *, enable_timing: bool) -> Any: ...  # noqa: N802

    def is_current_stream_capturing(self) -> bool: ...


Measured = tuple[int, int, int, int, int, Event, Event]  # words 1..5 of a record, begun, ended


class DeviceTimer:
    """Events of one process's device, and the spans that wait for them.

    The only wait is one `synchronize` when it is made, before the first step it measures.
    """

    def __init__(self, cuda: Cuda, recorder: Recorder) -> None:
        self._cuda = cuda
        self._recorder = recorder
        self._free: list[Event] = []
        self._queue: deque[Measured] = deque()
        self._reports: deque[tuple[Event, int, tuple[SupportsFloat | None, ...]]] = deque()
        self._next_anchor: tuple[Event, int] | None = None
        self.dropped = 0  # pairs beyond MAXIMUM_QUEUED
        self._anchor: Event = cuda.Event(enable_timing=True)
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = perf_counter_ns()

    def mark(self) -> Event | None:
        """An event where the current stream is now; None while a CUDA graph is captured."""
        if self._cuda.is_current_stream_capturing():
            return None
        event: Event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def enqueue(self, measured: Measured) -> None:
        if len(self._queue) >= MAXIMUM_QUEUED:
            self.dropped += 1
            self._free += measured[5:]
        else:
            self._queue.append(measured)

    def report(self, values: tuple[Any, ...]) -> None:
        """Values that may live on the device: copied without waiting, told when they arrive."""
        copies = tuple(
            value.detach().to("cpu", non_blocking=True) if on_device(value) else value
            for value in values
        )
        event = self.mark()
        if event is not None:
            self._reports.append((event, self._recorder.step, copies))

    def resolve(self) -> None:
        """At a step boundary: write what the device has passed by now, and renew the anchor."""
        self._renew_anchor()
        queue = self._queue
        while queue and queue[0][6].query():
            *words, begun, ended = queue.popleft()
            start_ns = self._host_ns(begun)
            duration_ns = max(0, int(begun.elapsed_time(ended) * 1e6))
            word1, word2, peer, size, sequence = words
            word1 |= DEVICE_BITS
            self._recorder.write(word1, word2, peer, size, sequence, start_ns, duration_ns)
            self._free += (begun, ended)
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
    """A section measured by device events; the state page shows the host's side as ever."""

    __slots__ = ("begun", "timer")

    def __init__(self, recorder: Recorder, op: int, timer: DeviceTimer) -> None:
        super().__init__(recorder, op)
        self.timer = timer
        self.begun: list[Event | None] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.begun.append(self.timer.mark())

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        begun, ended = self.begun.pop(), self.timer.mark()
        if begun is None or ended is None:
            super().__exit__(kind, error, trace)
            return
        recorder = self.recorder
        word1 = self.op | recorder.chunk << 32
        self.timer.enqueue((word1, recorder.word2, NONE_32, 0, 0, begun, ended))
        self.close()


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
        self.begun: list[Event | None] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.begun.append(self.timer.mark())

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        begun, ended = self.begun.pop(), self.timer.mark()
        if begun is None or ended is None or self._is_under_way():
            super().__exit__(kind, error, trace)
            return
        word1, word2 = self.op | self.chunk << 32, self.recorder.word2
        self.timer.enqueue((word1, word2, self.peer, self.size, self.sequence, begun, ended))
        self.close()

    def _is_under_way(self) -> bool:
        return False


class DeviceTransfer(DevicePipelining, Transfer):
    """A sending or receiving action measured by device events."""

    def _is_under_way(self) -> bool:
        return self.is_under_way


def on_device(value: object) -> bool:
    """Whether it is a tensor (or a list that begins with one) of a CUDA device."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return bool(getattr(value, "is_cuda", False))
