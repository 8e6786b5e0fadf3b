"""Step boundaries: marked by the script, iterations of `paceline.steps`, or recognized.

Who decides, in this order:

1. the script, once it calls `begin` or uses a `StepBlock`;
2. optimizer steps, as `recognition.py` sees them: a step ends when the next batch is fetched after
   one, so that batches between two optimizer steps are microbatches of one step. Without a step of
   torch's optimizers, updates of the parameters take their place;
3. iterations of `run`, if no torch optimizer takes part.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter_ns
from typing import Protocol, TypeVar

from paceline.batches import BatchCounter
from paceline.environment import process_started_ns
from paceline.recorder import Recorder
from paceline.writer import Section
from paceline.writer.interface import NO_CHUNK, NO_MICROBATCH
from paceline_wire.ring import Status
from paceline_wire.spans import NONE_32, Op

Batch = TypeVar("Batch")

# Iterations of `run` that may pass without an optimizer step before iterations are steps after all:
# the optimizer is compiled, or a graph of the device replays it.
MOST_MICROBATCHES = 256
MOST_BATCHES_WITHOUT_BACKWARD = 64


class LoopWatcher(Protocol):
    """Is called when the loop passes certain points."""

    evaluates: bool  # something may be an evaluation, which ends with the next iteration

    def iteration_begins(self) -> None:
        """`run` is about to fetch a batch, and `evaluates` is true."""

    def wait_ends(self) -> None:
        """A batch is there."""

    def note_update(self) -> None:
        """Add to `optimizer_calls` if the parameters were updated by nothing that is called."""


class Resumable(Protocol):
    """The state of a script, which is saved and resumed at the boundaries of its loop."""

    @property
    def step(self) -> int | None:
        """Number of completed steps; None: the loop counts them."""

    def begin(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Begin an iteration over the loader, where the saved one was."""

    def boundary(self) -> bool:
        """Save if it is time. Return whether the loop ends on request."""

    def took(self) -> None:
        """Note that a batch was taken."""

    def end(self) -> None:
        """End the iteration."""


def iterate(loader: Iterable[Batch], state: Resumable | None) -> Iterator[Batch]:
    """Yield the loader's batches without recording the steps."""
    # `yield from` would close the loader's own iterator.
    batches = iter(loader) if state is None else state.begin(loader)
    fetched: list[Batch] = []
    try:
        while state is None or not state.boundary():
            try:
                fetched.append(next(batches))
            except StopIteration:
                return
            if state is not None:
                state.took()
            yield fetched.pop()  # only the script holds it during its step
    finally:
        if state is not None:
            state.end()


class Loop:
    """The step counter of a process; marks the step boundaries in the ring.

    A wait for data that begins between two steps is the start of the next step. All of this belongs
    to the thread that owns the ring; in others nothing happens.

    An error of the watcher is counted and does not end the training loop. A step makes few calls
    here: between two kernels of the training, each costs 1 to 2 us.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.at_boundary: Callable[[], None] | None = None  # set if there may be a device
        self.at_start: Callable[[], None] | None = None  # before the first step
        self.has_optimizer: Callable[[], bool] = bool  # whether the script has a torch optimizer
        self.first_step: Callable[[], int] | None = None  # if the script numbers none
        self.after_step: Callable[[], None] | None = None
        self.watcher: LoopWatcher | None = None
        self.is_open = False  # a step has begun
        self.is_explicit = False  # the script marks its steps
        self.is_running = False  # inside `run`
        self.is_numbered = False  # the script gave `run` the number of a step
        self.is_waiting = False  # for data
        # The open step, as `recognition.py` sees it:
        self.backwards = 0
        self.batches = 0
        self.optimizer_calls: list[int] = []  # one key per call
        self.work = BatchCounter()
        self.optimized_ns = 0  # end of the last call
        self.has_optimized = False  # in any step
        self.has_updated = False  # in any step, without an optimizer of torch
        # Added to the numbers of a script that counts from the beginning again in each of several
        # trainings, so that no number is used twice.
        self.offset = 0
        self._first_given: int | None = None  # number of its first step, as the script numbers it
        self._next_step = 0
        self._started = False
        self._marked = False  # the script began the open step, and will end it
        self._blocks = 0  # open `StepBlock`s
        self._waits = 0  # open waits for data, nested
        self._begins_step = False  # the open wait is the start of its step
        self._wait = Section(recorder, Op.DATA_WAIT)

    @property
    def is_recognized(self) -> bool:
        """Return whether nothing but `recognition.py` marks steps."""
        return not self.is_explicit and not self.is_running

    @property
    def has_steps(self) -> bool:
        """Return whether steps are known to end with an optimizer step or another update."""
        return self.has_optimized or self.has_updated

    def is_usable(self) -> bool:
        """Return whether this is the thread that trains."""
        return get_ident() == self._recorder.owner

    # Numbers of the script

    def begin_training(self, step: int) -> None:
        """Begin a training whose first step has this number.

        It may be the second one of this process.
        """
        if self._started and step + self.offset < self._next_step:
            self.offset = self._next_step - step
        self._first_given = step

    def _recorded(self, step: int) -> int:
        """Return the number to record for a step of the script.

        A script that numbers a step as its first one again, after others, trains again. A single
        step that it does again, or a return to a later one, is no new training.
        """
        if self._first_given is None:
            self._first_given = step
        elif step <= self._first_given and step + self.offset < self._next_step - 1:
            self.begin_training(step)
        return step + self.offset

    # Calls of the script

    def begin(self, step: int | None = None) -> None:
        """Begin a step; end the previous one if `end` was not called. Nothing in a `StepBlock`."""
        if self.is_usable() and not self._blocks:
            if self._marked:
                self.end_step()
            self._mark(step)

    def end(self) -> None:
        """End the step that `begin` began, if it is open."""
        if self.is_usable() and self._marked and not self._blocks:
            self.end_step()

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
            self._drop()
        elif begun and self._marked:
            self.end_step()

    def _mark(self, step: int | None) -> None:
        if not self.is_explicit:
            self.is_explicit = True
            if self.is_open and self.optimizer_calls:  # what was recognized before is over
                self.end_step()
        if self._waits:  # the loader itself marks steps: its wait ends here
            self._waits = 1
            self.end_wait()
        step = None if step is None else self._recorded(step)
        if not self.is_open or step not in (None, self._recorder.step):
            self.begin_step(self._next_step if step is None else step)
        self._marked = True

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun in this process."""
        return self._started

    def completed_steps(self) -> int | None:
        """Return how many steps are completed at this point; None before the first one."""
        if not self._started:
            return None
        if self.is_recognized and self.watcher is not None:
            self.watcher.note_update()
        if not self.is_open:  # the recorder may have the number of a step that was dropped
            return self._next_step
        has_stepped = self.optimizer_calls or not self.has_steps
        return self._recorder.step + bool(has_stepped)

    # Waits for data

    def begin_wait(self) -> None:
        """Begin to wait for data; between two steps, with the next step."""
        if self._waits:
            self._waits += 1
            return
        if self.optimizer_calls and self.is_recognized:
            self.end_step()
        self._waits = 1
        self.is_waiting = True
        self._begins_step = not self.is_open
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
            self.is_waiting = False
            self.batches += 1
            if self._begins_step:
                self._recorder.end_data_wait()
            else:
                self._wait.__exit__(None, None, None)
            if self.watcher is not None:
                try:
                    self.watcher.wait_ends()
                except Exception:
                    self._recorder.failures += 1

    def cancel_wait(self) -> None:
        """End a wait for data that brought none, and drop the step that it began."""
        if not self._waits:
            return
        self._waits -= 1
        if not self._waits:
            self.is_waiting = False
            if self._begins_step:
                self._drop()
            else:
                self._wait.__exit__(None, None, None)

    # Iterations

    def run(
        self, loader: Iterable[Batch], start: int | None, state: Resumable | None = None
    ) -> Iterator[Batch]:
        """Yield the loader's batches and record the steps; a nested loop records nothing."""
        # Checked at the first batch: an iterator may be created earlier.
        if self.is_running or self._waits or not self.is_usable():
            yield from iterate(loader, state)
            return
        if self.is_open and not self.is_explicit:  # recognized until now
            self._leave()
        self.is_running = True
        fetched: list[Batch] = []
        try:
            if state is None:
                batches = iter(loader)
                start = start if start is None else self._recorded(start)
            else:
                batches = state.begin(loader)
                start = start if state.step is None else state.step
                self.offset = 0  # its checkpoints have the numbers of the steps
            if start is not None and not self.is_open:
                self._next_step, self.is_numbered = start, True
            while True:
                may_end = self.is_open and not self.is_explicit
                if may_end and not self.optimizer_calls:
                    self._note_update()
                if state is not None and state.boundary():
                    return
                if self.watcher is not None and self.watcher.evaluates:
                    try:
                        self.watcher.iteration_begins()
                    except Exception:
                        self._recorder.failures += 1
                if may_end and (self.optimizer_calls or self._is_over()):
                    self.end_step()
                self.begin_wait()
                try:
                    fetched.append(next(batches))
                except StopIteration:
                    self.cancel_wait()
                    return
                except BaseException:
                    self.cancel_wait()
                    raise
                self.end_wait()
                self.work.add(fetched[0])
                if state is not None:
                    state.took()
                yield fetched.pop()  # only the script holds it during its step
        finally:
            self.is_running = False
            if state is not None:
                state.end()
            if not self._marked:
                self._leave()

    def _note_update(self) -> None:
        """Look for an update that no optimizer of torch made."""
        if self.watcher is not None and self.has_optimizer():
            try:
                self.watcher.note_update()
            except Exception:
                self._recorder.failures += 1

    def _is_over(self) -> bool:
        """Return whether the next iteration of `run` begins another step, without an optimizer
        step since the last one."""
        most = MOST_MICROBATCHES if self.backwards else MOST_BATCHES_WITHOUT_BACKWARD
        if self.batches < most and (self.has_optimized or self.has_optimizer()):
            return False
        if self.batches >= most or self.backwards:
            self.has_optimized = False
            self.has_optimizer = bool  # iterations are steps from now on
        return True

    def _leave(self) -> None:
        """Leave a loop by its end, `break` or an error: a step if it measured anything."""
        is_step = self.optimizer_calls or not (self.has_steps or self.backwards)
        if self.is_open and not self.is_explicit and is_step and self._has_content():
            self.end_step()
        else:
            self._drop()

    def _has_content(self) -> bool:
        return self._recorder.head > self._recorder.step_head

    # Steps

    def begin_step(self, step: int | None = None) -> None:
        """Begin a step without a wait for data."""
        self._begin_step(self._next_step if step is None else step)
        self._recorder.pop(1)

    def _begin_step(self, step: int) -> None:
        recorder = self._recorder
        if not self._started:
            step = self._begin_first(step)
        if self.at_boundary is not None:
            self.at_boundary()
        recorder.begin_step(step)
        self._next_step = step
        self.is_open = True
        self.backwards = self.batches = 0
        self.optimizer_calls.clear()
        if not self._started:
            self._start()

    def _begin_first(self, step: int) -> int:
        """Prepare the first step. Return its number.

        A script that resumes has loaded its optimizer: the steps that this has made continue.
        """
        if self.at_start is not None:
            self.at_start()
        if step or not self.is_recognized or self.first_step is None:
            return step
        try:
            return self.first_step()
        except Exception:
            self._recorder.failures += 1
            return step

    def _start(self) -> None:
        """Record the time from the start of the process to the first step."""
        self._started = True
        self._recorder.set_status(Status.RUNNING)
        process_ns, now = process_started_ns(), self._recorder.step_started_ns
        if process_ns is not None and process_ns < now:
            self._recorder.write_simple(Op.STARTUP, process_ns, now)

    def end_step(self, at_ns: int | None = None) -> None:
        """Record the open step; it ended at `at_ns`, default now."""
        recorder, work = self._recorder, self.work
        if work.samples or work.tokens:
            self._end_counted_step(perf_counter_ns() if at_ns is None else at_ns)
        elif at_ns is None:
            recorder.end_step()
        else:
            recorder.write_simple(Op.STEP, recorder.step_started_ns, at_ns)
        self._next_step = recorder.step + 1
        if self.after_step is not None:
            try:
                self.after_step()
            except Exception:
                self._recorder.failures += 1
        self._drop()

    def _end_counted_step(self, at_ns: int) -> None:
        """Record the step with its samples and tokens."""
        recorder, work, started = self._recorder, self.work, self._recorder.step_started_ns
        place = Op.STEP | NO_CHUNK << 32, recorder.step | NO_MICROBATCH, NONE_32
        recorder.write(*place, work.tokens, work.samples, started, at_ns - started)

    def _drop(self) -> None:
        """Close the step without recording it."""
        work = self.work
        work.samples = work.tokens = 0
        self.is_open = self.is_waiting = self._marked = False
        self._waits = 0
        self.optimizer_calls.clear()
        self._recorder.clear_frames()
        if self._recorder.queue:
            self._recorder.drain()

    def finish(self) -> None:
        """Record the last step, which no fetch of a batch has ended, if it is complete."""
        if self.is_recognized and self.watcher is not None:
            self.watcher.note_update()
        if self.is_open and not self._marked and self.optimizer_calls:
            has_optimized = self.optimized_ns > self._recorder.step_started_ns
            self.end_step(self.optimized_ns if has_optimized else None)


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
            if kind is None:
                self._loop.end_wait()
            else:
                self._loop.cancel_wait()
