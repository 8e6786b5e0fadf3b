"""`paceline.steps`: each iteration over the data loader is one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from paceline.environment import process_started_ns
from paceline.recorder import Recorder
from paceline_wire.ring import Status
from paceline_wire.spans import Op

Batch = TypeVar("Batch")


class Steps(Generic[Batch]):
    """An iterable over a data loader that also has the loader's attributes and length."""

    def __init__(
        self, loader: Iterable[Batch], find_loop: Callable[[], Loop | None], start: int | None
    ) -> None:
        self._loader = loader
        self._find_loop = find_loop  # called at iteration: a loader may be created before `init`
        self._start = start

    def __iter__(self) -> Iterator[Batch]:
        loop = self._find_loop()
        if loop is None:
            return iter(self._loader)
        start, self._start = self._start, None  # the next epoch continues the count
        return loop.run(self._loader, start)

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no len()")
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as `sampler` or `batch_size`."""
        if name == "_loader" or name.startswith("__"):  # copy and pickle: no `__init__` yet
            raise AttributeError(name)
        return getattr(self._loader, name)


class Loop:
    """The step counter of a process; marks the step boundaries in the ring."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.at_boundary: Callable[[], None] | None = None  # set if there may be a device
        self._next_step = 0
        self._started = False
        self._running = False

    def run(self, loader: Iterable[Batch], start: int | None) -> Iterator[Batch]:
        """Yield the loader's batches and record each as a step; a nested loop records nothing."""
        if self._running:  # checked at the first batch: an iterator may be created earlier
            for batch in loader:
                yield batch  # `yield from` would close the loader's own iterator
            return
        step = self._next_step if start is None else start
        self._running = True
        try:
            # Local names for what each step needs: between two kernels the caches are cold.
            recorder, batches = self._recorder, iter(loader)
            queue, at_boundary = recorder.queue, self.at_boundary
            if at_boundary is not None:
                at_boundary()
            recorder.begin_step(step)
            self._begin()
            for batch in batches:
                recorder.end_data_wait()
                try:
                    yield batch
                except GeneratorExit:
                    # The script left by `break` or an error: a step if it measured anything.
                    if recorder.head > recorder.step_head:
                        recorder.end_step()
                        step += 1
                    raise
                recorder.end_step()
                step += 1
                if queue:
                    recorder.drain()
                if at_boundary is not None:
                    at_boundary()
                recorder.begin_step(step)
        finally:
            self._running = False
            self._next_step = step
            self._recorder.leave_loop()

    def _begin(self) -> None:
        self._recorder.set_status(Status.RUNNING)
        if self._started:
            return
        self._started = True
        process_ns, now = process_started_ns(), self._recorder.step_started_ns
        if process_ns is not None and process_ns < now:
            self._recorder.write_simple(Op.STARTUP, process_ns, now)
