"""`paceline.steps`: each iteration over the loader is one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Generic, TypeVar

from paceline.environment import process_started_ns
from paceline.recorder import Recorder
from paceline_wire.ring import Status
from paceline_wire.spans import Op

Batch = TypeVar("Batch")


class Steps(Generic[Batch]):
    """Iterates like the loader it was given, and has its length where it has one."""

    def __init__(self, loader: Iterable[Batch], loop: Loop | None, start: int | None) -> None:
        self._loader = loader
        self._loop = loop
        self._start = start

    def __iter__(self) -> Iterator[Batch]:
        if self._loop is None or self._loop.running:
            return iter(self._loader)
        return self._loop.run(self._loader, self._start)

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no len()")
        return len(self._loader)


class Loop:
    """Numbers the steps of a process and marks their boundaries."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.at_boundary: Callable[[], None] | None = None  # where there may be a device
        self._next_step = 0
        self._started = False
        self.running = False

    def run(self, loader: Iterable[Batch], start: int | None) -> Iterator[Batch]:
        if start is not None:
            self._next_step = start
        self.running = True
        try:
            yield from self._steps(iter(loader))
        finally:
            self.running = False
            self._recorder.leave_loop()

    def _steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        recorder = self._recorder
        while True:
            if self.at_boundary is not None:
                self.at_boundary()
            recorder.begin_step(self._next_step)
            if not self._started:
                self._record_startup()
            if recorder.status != Status.RUNNING:
                recorder.set_status(Status.RUNNING)
            try:
                batch = next(batches)
            except StopIteration:
                return
            recorder.end_data_wait()
            head = recorder.head
            try:
                yield batch
            except GeneratorExit:
                # Left by break or an error: it was a step if anything was measured in it.
                if recorder.head > head:
                    self._end_step()
                raise
            self._end_step()

    def _end_step(self) -> None:
        self._recorder.end_step()
        if self._recorder.queue:
            self._recorder.drain()
        self._next_step += 1

    def _record_startup(self) -> None:
        self._started = True
        process_ns, now = process_started_ns(), self._recorder.step_started_ns
        if process_ns is not None and process_ns < now:
            self._recorder.write_simple(Op.STARTUP, process_ns, now)
