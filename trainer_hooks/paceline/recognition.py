"""Recognition of steps and their phases from what torch does, as `torch_events.py` reports it.

- *Step*: from one optimizer step to the next. If batches come from a `DataLoader`, a step ends when
  the next batch is fetched after an optimizer step; several optimizers in between belong to it.
  Else it ends with the last optimizer of the sequence that repeats.
  Without an optimizer of torch, or with a compiled one, an update of the parameters takes its place
  (`updates.py`). If none can be seen, each batch is a step, or each backward pass without a loader.
- *Forward*: from a batch, an optimizer step or a backward pass to the next backward pass.
- *Evaluation*: batches of a loader that trains nothing, or of one that trains but is read without
  gradients now, or a module between `eval()` and `train()`, and no backward pass inside. What
  happens in every step is part of the step.

What the script marks itself is not recorded again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

from paceline.loop import MOST_BATCHES_WITHOUT_BACKWARD, MOST_MICROBATCHES, Loop
from paceline.recorder import Recorder
from paceline.sections import StatusSection
from paceline.updates import UpdateProbe
from paceline.writer import Section
from paceline_wire.ring import Status
from paceline_wire.spans import Op

IN_BACKWARD = 0  # key of all optimizers that step inside a backward pass
UNSEEN = 1  # key of an update that no optimizer of torch made
# Optimizer steps per batch, with backward passes between them, from which each is a step.
MOST_OPTIMIZER_STEPS = 64
# Backward passes without an update from which each batch is a step, or each backward pass.
MOST_MICROBATCHES_UNSEEN = 8
MOST_MICROBATCHES_OF_AN_OPTIMIZER = 64
MOST_REPEATED = 8  # optimizer steps of a loop that are one step if some optimizer repeats in it
MOST_CYCLES = 8  # sequences of optimizers that are one step each and are known at a time
MOST_REJECTED_EVALUATIONS = 2  # modules switched to `eval()` without an evaluation


class Sections(Protocol):
    """The part of `Session` that recognition uses."""

    recorder: Recorder
    loop: Loop
    optimizer: Section  # the script's own, open while it times the optimizer's step itself
    optimizer_phase: Section
    backward_phase: Section
    checkpoint: StatusSection
    framework_checkpoint: StatusSection
    evaluate: StatusSection
    marks_evaluations: bool
    marks_compute: bool  # the script times its forwards and backwards itself


class Forward(Protocol):
    """Measures the forward pass: the writer on the host, `DeviceForward` on a device."""

    def begin_forward(self) -> None:
        """Start a forward pass, or start it again."""

    def end_forward(self) -> None:
        """Record the forward pass, if it began in this step."""

    def drop_forward(self) -> None:
        """Forget the forward pass: there was none."""


class Recognition:
    """Marks steps, forwards, backwards, optimizer steps and evaluations of one session.

    The owner thread calls all methods, except `optimizer_in_backward`. As in `Loop`, a step makes
    few calls of functions in Python.
    """

    def __init__(self, session: Sections) -> None:
        self._session = session
        self._recorder = session.recorder
        self._loop = session.loop
        self._backward_depth = 0
        self._optimized_in_backward = False
        self._optimizers: list[int] = []  # that step at this moment, outermost first
        self._called_at: dict[int, int] = {}  # backwards of the step when an optimizer stepped
        self._cycles: list[tuple[int, ...]] = []  # optimizers of the steps without batches
        self._history: deque[int] = deque(maxlen=MOST_OPTIMIZER_STEPS)  # optimizers, newest last
        self.measure_forward(session.recorder)
        self.evaluates = False  # `_evaluation` has begun
        self._evaluation = _Evaluation()
        # The module that was switched to `eval()` between two steps.
        self._switched: Callable[[], Any] = _nothing
        self._training: set[int] = set()  # keys of loaders whose batches are trained on
        self._with_gradients: set[int] = set()  # keys of loaders that were read with gradients on
        self._trains_without = False  # and others are trained on that were read without
        self._fetched: dict[int, int] = {}  # batches by loader since the last backward pass
        self._latest = 0  # key of the loader of the last batch
        self._evaluated_step: int | None = None
        self._rejected = 0
        self.has_one_optimizer: Callable[[], bool] = bool  # the script is known to have no other
        self.probe: UpdateProbe | None = None  # finds updates until optimizer steps are seen
        self._most_microbatches = 0  # backward passes up to an optimizer step
        self._counts_passes = False  # no update is seen: batches or backward passes are steps
        self._counts_batches = False  # nor a backward pass: batches are steps
        self._has_backward = False  # `backward()` was called; then `autograd.grad` trains nothing
        self._has_gradients = False  # `autograd.grad` was counted as a backward pass
        self.microbatches = 0  # backward passes of the newest step
        self.has_data = False  # waits of a DataLoader were seen

    def measure_forward(self, forward: Forward) -> None:
        """Use this from now on."""
        self._begin_forward = forward.begin_forward
        self._end_forward = forward.end_forward
        self._drop_forward = forward.drop_forward

    # Events of the loop

    def iteration_begins(self) -> None:
        """`paceline.steps` is about to fetch a batch."""
        self._end_evaluation()

    def wait_ends(self) -> None:
        """A batch is there. Its forward pass begins, also if this may be an evaluation."""
        self._begin_forward()

    def describe(self) -> str:
        """Return in one line what a step is and how it was found; the same on all ranks.

        Called when a step has ended, before the next one begins.
        """
        loop = self._loop
        self.microbatches = loop.backwards or self.microbatches
        if loop.is_explicit:
            steps = "marked by the script"
        elif loop.has_optimized:
            steps = "from optimizer steps"
        elif (self._counts_passes or self._counts_batches) and loop.is_recognized:
            steps = "batches" if self.has_data else "backward passes"
        elif loop.has_updated:
            steps = "from updates of the parameters"
        else:
            steps = "iterations of paceline.steps"
        parts = [steps]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches each")
        if self.has_data:
            parts.append("data waits of the DataLoader")
        if self.microbatches and not self._session.marks_compute:
            parts.append("forward and backward from autograd")
        return ", ".join(parts)

    # Data

    def fetch_begins(self, loader: int, *, has_gradients: bool) -> bool:
        """A `DataLoader` is about to return a batch. Return whether the wait is recorded."""
        loop = self._loop
        if loop.is_waiting:  # in `paceline.steps` or `data_wait`: this loader is trained on
            self._training.add(loader)
            self._fetched.clear()
            return False
        if self.evaluates and not self._is_evaluated(loader, has_gradients=has_gradients):
            self._end_evaluation()
        if self.evaluates:
            evaluation, is_trained_on = self._evaluation, loader in self._training
            evaluation.batches += 1
            evaluation.trained_on_ns = perf_counter_ns() if is_trained_on else 0
            if not (is_trained_on and has_gradients and self._ends_step()):
                self._count(loader)
                self._recorder.show_progress()
                return False
            evaluation.work = 0, 0  # the batch may as well be the first of the next step
        elif has_gradients and not self._trains_without:
            self._with_gradients.add(loader)
        if has_gradients or loop.is_open:
            self._count(loader)
        if not (loop.is_open or loop.is_explicit or loop.has_steps):
            self._recorder.show_progress()
            return False  # steps begin with the first backward pass
        self.has_data = True
        if loop.is_recognized:
            self.note_update()
        self._drop_forward()
        loop.begin_wait()
        if not self.evaluates and self._begins_evaluation(loader, has_gradients=has_gradients):
            self._begin_evaluation(self._switched, batches=1)
            self._switched = _nothing
        return True

    def _begins_evaluation(self, loader: int, *, has_gradients: bool) -> bool:
        """Return whether an evaluation may begin with a batch of this loader."""
        if loader not in self._training:
            return not has_gradients or bool(self._training)
        is_read_without = not has_gradients and loader in self._with_gradients
        return is_read_without or self._switched() is not None

    def _is_evaluated(self, loader: int, *, has_gradients: bool) -> bool:
        """Return whether the evaluation may go on with a batch of this loader.

        A script may also train on while its module is in `eval()`: a backward pass shows that.
        """
        if loader not in self._training or not has_gradients:
            return True
        evaluation = self._evaluation
        return evaluation.of_module and not (evaluation.batches and self._ends_step())

    def _ends_step(self) -> bool:
        """Return whether the next batch that is trained on begins another step."""
        return self._loop.is_recognized and bool(self._loop.optimizer_calls)

    def fetch_ends(self, batch: Any, *, recorded: bool) -> None:
        """The batch is there."""
        if recorded:
            self._loop.end_wait()
            self._loop.work.add(batch)
        else:
            self._begin_forward()

    def loader_ends(self, *, recorded: bool) -> None:
        """There was no further batch."""
        if recorded:
            self._loop.cancel_wait()
        self._evaluation.exhausted = True

    def _count(self, loader: int) -> None:
        self._fetched[loader] = self._fetched.get(loader, 0) + 1
        self._latest = loader

    # Backward

    def backward_begins(self, outputs: Any = None) -> None:
        """A backward pass begins, from these outputs."""
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        if not self._has_backward:
            self._has_backward = True
            if self._has_gradients:
                self._forget_gradients()
        self._pass_begins(outputs)

    def gradients_begin(self, outputs: Any, inputs: Any) -> bool:
        """`autograd.grad` is about to run. Return whether it is a backward pass of the training.

        It is one in a training that never calls `backward()`.
        """
        ignored = self._has_backward or self._backward_depth or self._optimizers
        if ignored or self._session.marks_compute:
            return False
        self._backward_depth = 1
        self._has_gradients = True
        self._pass_begins(outputs, inputs)
        return True

    def _forget_gradients(self) -> None:
        """Begin the step again: what `autograd.grad` did in it was part of the forward pass."""
        loop = self._loop
        if loop.is_open and loop.is_recognized and not loop.optimizer_calls:
            loop.begin_step()
        if self.probe is not None:
            self.probe.forget()

    def _pass_begins(self, outputs: Any, inputs: Any = ()) -> None:
        """Begin a backward pass that is inside no other one."""
        loop = self._loop
        is_fetched = bool(self._fetched)
        if loop.is_open and not self._fetched and not self.evaluates:
            loop.backwards += 1  # as in `_count_backward`, without a call
        elif not self._count_backward():
            return
        if self._optimizers:
            pass
        elif loop.optimizer_calls and loop.optimizer_calls[-1] != UNSEEN:
            self._begin_step_of_known_optimizer()
        elif self.probe is not None and self._awaits_update():
            self._end_updated_step(is_fetched=is_fetched)
            self.probe.choose(outputs, inputs)
        session = self._session
        if session.marks_compute:
            self._drop_forward()
            return
        self._end_forward()
        session.backward_phase.__enter__()

    def backward_ends(self) -> None:
        """A backward pass has ended, also by an error."""
        self._backward_depth -= 1
        if self._backward_depth > 0:
            return
        backward = self._session.backward_phase
        if backward.start:
            backward.__exit__(None, None, None)
        if self._optimized_in_backward:
            self._optimized_in_backward = False
            self._called_at[IN_BACKWARD] = self._loop.backwards
            self._optimized(IN_BACKWARD)
        elif self.probe is not None and self._awaits_update():
            self._loop.optimized_ns = perf_counter_ns()  # an update comes later than this
            self.probe.record()
        self._begin_forward()

    def backward_ran(self) -> None:
        """A backward pass of which the begin was not seen has ended."""
        if not self._backward_depth:
            self._count_backward()

    def _count_backward(self) -> bool:
        """Count a backward pass in its step. Return False if it is outside of the marked steps."""
        loop = self._loop
        if self._fetched:
            self._learn_loaders()
        if self.evaluates:
            self._reject_evaluation()
        if not loop.is_open:
            if loop.is_explicit:
                return False
            loop.begin_step()
        loop.backwards += 1
        return True

    def _learn_loaders(self) -> None:
        """Mark the loaders whose batches this backward pass comes from.

        The last batch is one; loaders that gave no more batches than its loader go with it.
        """
        newest = self._fetched[self._latest]
        is_evaluation = self.evaluates and (newest > 1 or self._evaluation.exhausted)
        if not is_evaluation:
            self._training.update(key for key, n in self._fetched.items() if n <= newest)
        self._fetched.clear()

    # Optimizer

    def optimizer_in_backward(self) -> None:
        """An optimizer steps inside a backward pass, in any thread."""
        self._optimized_in_backward = True

    def optimizer_begins(self, optimizer: int) -> None:
        """An optimizer's step begins; it may contain backward passes (a closure) or other ones."""
        if self._backward_depth:
            self._optimized_in_backward = True
            return
        if optimizer in self._optimizers:  # it raised an error
            self._optimizers.clear()
            if (section := self._session.optimizer_phase).start:
                section.close()
        self._optimizers.append(optimizer)
        if len(self._optimizers) > 1:
            return
        loop = self._loop
        if loop.optimizer_calls:
            self._end_repeated_cycle(optimizer)
        if not loop.is_open:
            return  # outside of marked steps, or before any backward pass
        self._called_at[optimizer] = loop.backwards
        if not self._session.optimizer.start:
            self._session.optimizer_phase.__enter__()
        self._begin_forward()  # the closure's

    def optimizer_ends(self, optimizer: int) -> None:
        """An optimizer's step has ended."""
        if optimizer in self._optimizers:
            del self._optimizers[self._optimizers.index(optimizer) :]
        elif not self._optimizers and not self._backward_depth:
            # Its begin was not seen: torch.compile has left the hook out, or the hooks were
            # registered by a backward pass of its closure.
            self._end_repeated_cycle(optimizer)
        if not self._optimizers:
            section = self._session.optimizer_phase
            if section.start:
                section.__exit__(None, None, None)
            self._optimized(optimizer)
            self._begin_forward()

    def optimizer_skipped(self, optimizer: int) -> None:
        """A gradient scaler left out an optimizer's step, because gradients are not finite."""
        self._end_repeated_cycle(optimizer)
        self._called_at[optimizer] = self._loop.backwards
        self._optimized(optimizer)

    def _optimized(self, optimizer: int) -> None:
        loop = self._loop
        if not loop.is_open or not (loop.backwards or loop.optimizer_calls):
            return
        if loop.backwards > self._most_microbatches:
            self._most_microbatches = loop.backwards
        if not loop.has_optimized:
            loop.has_optimized = True
            self._counts_passes = self._counts_batches = False
            if self.probe is not None:
                self.probe.forget()
        loop.optimizer_calls.append(optimizer)
        self._history.append(optimizer)
        loop.optimized_ns = perf_counter_ns()
        if self._cycles and self._counts_optimizers() and self._ends_cycle():
            loop.end_step()
            loop.begin_step()

    def _ends_cycle(self) -> bool:
        """Return whether the optimizers of the step are complete with the last one."""
        if len(self._cycles) > 1 and (period := _period(tuple(self._history))):
            self._cycles = [period]
            return True
        return tuple(self._loop.optimizer_calls) in self._cycles

    def _counts_optimizers(self) -> bool:
        """Return whether optimizer steps alone end this step: it has no batches."""
        loop = self._loop
        has_batches = loop.batches and len(loop.optimizer_calls) < MOST_OPTIMIZER_STEPS
        return loop.is_recognized and not has_batches

    def _end_repeated_cycle(self, optimizer: int) -> None:
        """End the step if this optimizer has stepped in it, before another backward pass.

        Unless it is known to do so in each step, as where a critic learns twice per generator. Of
        an optimizer that steps now and then only, the steps with and without it are both known.
        """
        loop = self._loop
        calls = loop.optimizer_calls
        repeats = optimizer in calls and loop.backwards > self._called_at.get(optimizer, 0)
        if repeats and self._counts_optimizers():
            begun = (*calls, optimizer)
            if any(cycle[: len(begun)] == begun for cycle in self._cycles):
                return
            period = _period(tuple(self._history))
            known = [cycle for cycle in self._cycles if cycle != tuple(calls)]
            self._cycles = [period] if period else [*known[1 - MOST_CYCLES :], tuple(calls)]
            loop.end_step(loop.optimized_ns)
            loop.begin_step()
            loop.backwards = 1

    def _begin_step_of_known_optimizer(self) -> None:
        """End the step before this backward pass, if no other optimizer can belong to it."""
        calls = self._loop.optimizer_calls
        if IN_BACKWARD in calls:
            self._end_repeated_cycle(IN_BACKWARD)
        elif not self._cycles and self.has_one_optimizer():
            self._end_repeated_cycle(calls[0])

    # Updates that no optimizer of torch makes

    def _awaits_update(self) -> bool:
        """Return whether an update may come that no optimizer of torch makes: none has stepped, or
        the last one is longer ago than usual because it is compiled from now on."""
        loop = self._loop
        return not loop.has_optimized or loop.backwards > 2 * self._most_microbatches + 1

    def note_update(self) -> None:
        """Note in the open step that the parameters were updated, if they were."""
        loop = self._loop
        if not loop.is_open or loop.optimizer_calls:
            return
        if not loop.backwards:
            is_over = self._counts_batches and loop.batches > 0
            if is_over or loop.batches >= MOST_BATCHES_WITHOUT_BACKWARD:
                self._counts_batches = True  # a device replays a graph of the whole step
                self._updated()
        elif self._awaits_update() and self._is_updated(loop.backwards):
            self._counts_batches = False
            self._updated()

    def _updated(self) -> None:
        loop = self._loop
        loop.has_updated, loop.has_optimized = True, False
        loop.optimizer_calls.append(UNSEEN)

    def _end_updated_step(self, *, is_fetched: bool) -> None:
        """End the step before this backward pass, if the parameters were updated after the previous
        one, unless the same batch is trained on."""
        loop = self._loop
        before = loop.backwards - 1
        if not before or not loop.is_recognized:
            return
        if self._is_updated(before):
            self._updated()
        if not loop.optimizer_calls:
            return
        if is_fetched or self._counts_optimizers():
            if not self._session.marks_compute:
                self._end_forward()
            loop.backwards = before
            loop.end_step()
            loop.begin_step()
            loop.backwards = 1

    def _is_updated(self, backwards: int) -> bool:
        """Return whether an update followed these backward passes of the open step."""
        probe = self.probe
        if probe is None:
            return False
        if probe.has_update():
            self._counts_passes = False
            return True
        if not self._counts_passes:
            most = MOST_MICROBATCHES
            if not probe.is_usable:
                has_optimizer = self._loop.has_optimizer()
                most = MOST_MICROBATCHES_UNSEEN
                most = MOST_MICROBATCHES_OF_AN_OPTIMIZER if has_optimizer else most
            self._counts_passes = backwards >= most
        return self._counts_passes

    # Evaluation

    def evaluation_mode(self, module: Any) -> bool:
        """A module was switched to `eval()`. Return whether its `train()` is of interest."""
        loop = self._loop
        if self.evaluates or not loop.has_steps or self._session.marks_evaluations:
            return False
        if self._rejected >= MOST_REJECTED_EVALUATIONS:
            return False
        if not loop.is_open:
            self._switched = weakref.ref(module)
            return True
        self._begin_evaluation(weakref.ref(module))
        return self.evaluates

    def training_mode(self, module: Any) -> bool:
        """A module was switched to `train()`. Return whether this is of no further interest."""
        if module is self._switched():
            self._switched = _nothing
        elif module is self._evaluation.module():
            self._end_evaluation()
        return not self.evaluates and self._switched() is None

    def _begin_evaluation(self, module: Callable[[], Any], batches: int = 0) -> None:
        """Begin one, unless the script or an adapter marks it; the arguments are as in
        `_Evaluation`."""
        session = self._session
        checkpoints = session.checkpoint.start or session.framework_checkpoint.start
        if session.marks_evaluations or session.evaluate.start or checkpoints:
            return
        self._drop_forward()
        self._evaluation = _Evaluation(perf_counter_ns(), module, batches)
        self.evaluates = True
        self._evaluation.work = self._loop.work.samples, self._loop.work.tokens
        if self._recorder.status == Status.RUNNING:
            self._recorder.set_status(Status.EVALUATING)

    def _end_evaluation(self, ended_ns: int | None = None) -> None:
        """Record the evaluation, unless there was one in the step before as well.

        It ended at `ended_ns`, default now.
        """
        evaluation, step = self._evaluation, self._recorder.step
        self._close_evaluation()
        if self._evaluated_step is not None and step <= self._evaluated_step + 1:
            self._training.update(self._fetched)
            self._rejected += evaluation.of_module
        elif self._loop.is_open:
            start_ns = max(evaluation.start_ns, self._recorder.step_started_ns)
            self._recorder.write_simple(Op.EVALUATE, start_ns, ended_ns or perf_counter_ns())
            self._loop.work.samples, self._loop.work.tokens = evaluation.work
        self._evaluated_step = step
        self._fetched.clear()
        self._begin_forward()

    def _reject_evaluation(self) -> None:
        """A backward pass came: what began was no evaluation, unless its loader was exhausted."""
        evaluation = self._evaluation
        if evaluation.exhausted and not evaluation.of_module:
            self._end_evaluation()
            return
        if evaluation.trained_on_ns and evaluation.batches > 1:  # the last batch is trained on
            self._end_evaluation(evaluation.trained_on_ns)
            return
        if evaluation.of_module:
            self._rejected += 1
        else:  # batches that were read without gradients are trained on
            self._trains_without = True
            self._with_gradients.clear()
        self._close_evaluation()

    def _close_evaluation(self) -> None:
        self._evaluation = _Evaluation()
        self.evaluates = False
        if self._recorder.status == Status.EVALUATING:
            self._recorder.set_status(Status.RUNNING)


def _nothing() -> None:
    """Return no module, as a weak reference does whose module is gone."""


def _period(history: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shortest sequence of all optimizers that the history repeats at its end."""
    optimizers = set(history)
    for length in range(len(optimizers), min(len(history) // 2, MOST_REPEATED) + 1):
        newest = history[-length:]
        if newest == history[-2 * length : -length] and set(newest) == optimizers:
            return newest
    return None


class _Evaluation:
    """A possible evaluation, until it is recorded or rejected."""

    __slots__ = ("batches", "exhausted", "module", "start_ns", "trained_on_ns", "work")

    def __init__(
        self, start_ns: int = 0, module: Callable[[], Any] = _nothing, batches: int = 0
    ) -> None:
        self.start_ns = start_ns
        self.module = module  # returns what was switched to `eval()`
        self.batches = batches  # that were fetched since it began
        self.exhausted = False  # its loader has no further batch
        self.trained_on_ns = 0  # start of the newest one, if its loader is also trained on
        self.work = (0, 0)  # samples and tokens of the step before it

    @property
    def of_module(self) -> bool:
        return self.module is not _nothing
