"""Step boundaries: iterations of `paceline.steps`, or calls of `paceline.step` and `step_begin`."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from paceline.environment import process_started_ns
from paceline.recorder import Recorder
from paceline.writer import Section
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
    """The step counter of a process; marks the step boundaries in the ring.

    Boundaries come from the iterations of `run`, or, once the script uses `begin` or a `StepBlock`,
    from these only. A wait for data that begins between two steps is the start of the next
    step. All of this belongs to the thread that owns the ring; in others nothing happens.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.at_boundary: Callable[[], None] | None = None  # set if there may be a device
        self._next_step = 0
        self._started = False
        self._running = False  # inside `run`
        self._open = False  # a step has begun
        self._marked = False  # by a call of the script, which also ends it
        self._explicit = False  # the script calls `begin`: iterations are no steps
        self._blocks = 0  # open `StepBlock`s
        self._waits = 0  # open waits for data, nested
        self._begins_step = False  # the open wait is the start of its step
        self._wait = Section(recorder, Op.DATA_WAIT)

    # Calls of the script

    def begin(self, step: int | None = None) -> None:
        """Begin a step; end the previous one if `end` was not called. Nothing in a `StepBlock`."""
        if self.is_usable() and not self._blocks:
            if self._marked:
                self._end_step()
            self._mark(step)

    def end(self) -> None:
        """End the step that `begin` began, if it is open."""
        if self.is_usable() and self._marked and not self._blocks:
            self._end_step()

    def enter_block(self, step: int | None) -> bool:
        """Enter a `StepBlock`. Return whether it begins a step: not inside another one."""
        if not self.is_usable():
            return False
        begins = not self._marked and not self._blocks
        if begins:
            self._mark(step)
        self._blocks += 1
        return begins

    def leave_block(self, *, begun: bool, failed: bool) -> None:
        """Leave a `StepBlock`. A step that an exception ends is not counted."""
        if not self.is_usable():
            return
        self._blocks = max(0, self._blocks - 1)
        if begun and self._marked and failed:
            self._leave()
        elif begun and self._marked:
            self._end_step()

    def _mark(self, step: int | None) -> None:
        self._explicit = True
        if self._waits:  # the loader itself marks steps: its wait ends here
            self._waits = 1
            self.end_wait()
        if not self._open or step not in (None, self._recorder.step):
            self._begin_step(self._next_step if step is None else step)
            self._recorder.pop(1)  # nothing is waited for
        self._marked = True

    def is_usable(self) -> bool:
        """Return whether this is the thread that trains."""
        return get_ident() == self._recorder.owner

    # Waits for data

    def begin_wait(self) -> None:
        """Begin to wait for data; between two steps, with the next step."""
        self._waits += 1
        if self._waits > 1:
            return
        self._begins_step = not self._open
        if self._begins_step:
            self._begin_step(self._next_step)
        else:
            self._wait.__enter__()

    def end_wait(self) -> None:
        """End the wait for data."""
        if not self._waits:
            return
        self._waits -= 1
        if not self._waits:
            if self._begins_step:
                self._recorder.end_data_wait()
            else:
                self._wait.__exit__(None, None, None)

    # Iterations

    def run(self, loader: Iterable[Batch], start: int | None) -> Iterator[Batch]:
        """Yield the loader's batches and record each as a step; a nested loop records nothing."""
        # Checked at the first batch: an iterator may be created earlier.
        if self._running or self._waits or not self.is_usable():
            for batch in loader:
                yield batch  # `yield from` would close the loader's own iterator
            return
        self._running = True
        try:
            batches = iter(loader)
            if start is not None and not self._open:
                self._next_step = start
            while True:
                if self._open and not self._explicit:
                    self._end_step()
                self.begin_wait()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self.end_wait()
                try:
                    yield batch
                except GeneratorExit:
                    # The script left by `break` or an error: a step if it measured anything.
                    if self._open and not self._explicit and self._has_content():
                        self._end_step()
                    raise
        finally:
            self._running = False
            if not self._marked:
                self._leave()

    def _has_content(self) -> bool:
        return self._recorder.head > self._recorder.step_head

    # Steps

    def _begin_step(self, step: int) -> None:
        recorder = self._recorder
        if self.at_boundary is not None:
            self.at_boundary()
        recorder.begin_step(step)
        self._next_step = step
        self._open = True
        if not self._started:
            self._start()

    def _start(self) -> None:
        """Record the time from the start of the process to the first step."""
        self._started = True
        self._recorder.set_status(Status.RUNNING)
        process_ns, now = process_started_ns(), self._recorder.step_started_ns
        if process_ns is not None and process_ns < now:
            self._recorder.write_simple(Op.STARTUP, process_ns, now)

    def _end_step(self) -> None:
        recorder = self._recorder
        recorder.end_step()
        self._next_step = recorder.step + 1
        self._open = self._marked = False
        recorder.leave_loop()

    def _leave(self) -> None:
        """Drop the open step: nothing came of it."""
        self._open = self._marked = False
        self._waits = 0
        self._recorder.leave_loop()


class StepBlock:
    """A `with` block that is one optimizer step."""

    __slots__ = ("_begun", "_loop", "_step")

    def __init__(self, loop: Loop, step: int | None) -> None:
        self._loop = loop
        self._step = step
        self._begun = False

    def __enter__(self) -> None:
        self._begun = self._loop.enter_block(self._step)

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        self._loop.leave_block(begun=self._begun, failed=kind is not None)


class DataWait:
    """A `with` block that waits for data."""

    __slots__ = ("_loop",)

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        if self._loop.is_usable():
            self._loop.begin_wait()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        if self._loop.is_usable():
            self._loop.end_wait()
