"""The step boundaries as a framework counts them, and the edge that no error of ours passes.

Frameworks run inside each other: Hugging Face's Trainer on Accelerate, Lightning on DeepSpeed. Only
one adapter at a time marks the steps. A trainer takes them when its training begins; an engine,
whose loop is the script's, has them while no trainer does.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from itertools import count
from typing import Any, ParamSpec, TypeVar

from paceline import hooks
from paceline.hooks import (
    autostart,
    evaluate,
    framework_checkpoint,
    mark_evaluations,
    pipelining,
    step_begin,
    step_end,
    training_begins,
)
from paceline.sections import INERT
from paceline.session import log_once
from paceline.wrapping import replace
from paceline.writer.interface import Timed
from paceline_wire.spans import Op

P = ParamSpec("P")
R = TypeVar("R")

MOST_STEPS_OF_OTHERS = 100  # a GAN may train its critic so often for each step of the generator
_marking: StepBoundaries | None = None  # whose steps are recorded in this process


class NotResumedError(Exception):
    """A training that has saved would begin at step 0 again, and replace what it has saved."""


class StepBoundaries:
    """The steps of one training of one framework, and their parts.

    A step begins with its first data and lasts until the next one begins: evaluations and
    checkpoints after the optimizer belong to it. Repeated calls have no effect: a trainer may have
    two callbacks of ours, its default one and one of the script.
    """

    def __init__(self, *, with_evaluations: bool = False) -> None:
        self._with_evaluations = with_evaluations  # the adapter times each of them
        self.step: int | None = None  # in progress
        self._is_complete = False  # the optimizer stepped; the next begin ends the step
        self._microbatch = 0  # number in the step
        self._parts: dict[Op, Timed] = {}  # in progress
        self.has_resumed = False  # a training has begun in this process

    def take(self) -> None:
        """Mark the steps of this process from now on, also if another adapter did so before."""
        global _marking
        autostart()
        hooks.steps_of_framework = _completed
        mark_evaluations(self._with_evaluations)
        if _marking is not self:
            _marking = self
            self.step = None
            self._parts.clear()

    def claim(self) -> bool:
        """Take the steps if no other adapter has them. Return whether they are this one's."""
        if _marking is None:
            self.take()
        return _marking is self

    def resume(self, step: int) -> None:
        """Begin the training with the step to which its trainer has resumed.

        Raises:
            NotResumedError: `paceline run` has started the job again, it is known to have saved
                (`PACELINE_SAVED_STEP`), and this rank found nothing: its node may lack the mount.
        """
        saved = os.environ.get("PACELINE_SAVED_STEP") or "0"
        if step == 0 and saved != "0" and not self.has_resumed:
            raise NotResumedError(
                f"expected to resume from the checkpoint of step {saved}, found step 0 on "
                f"{socket.gethostname()}: its trainer has loaded no checkpoint. Check the mount of "
                "the checkpoints, and that the script resumes (such as "
                "resume_from_checkpoint). To train from step 0 again, start a new job."
            )
        if self.has_resumed:
            training_begins(step)
        self.has_resumed = True
        self.begin(step)

    @property
    def are_marked(self) -> bool:
        """Whether this object marks the steps of the process."""
        return _marking is self

    @property
    def completed(self) -> int | None:
        """Number of completed steps; None outside of a training."""
        return None if self.step is None else self.step + self._is_complete

    def begin(self, step: int) -> None:
        """Begin a step, unless one is in progress. `step`: number of completed steps."""
        if _marking is not self or (self.step is not None and not self._is_complete):
            return
        self.end_microbatch()
        if self.step is not None:
            step_end()
        self.step, self._is_complete, self._microbatch = step, False, 0
        step_begin(step)

    def complete(self) -> None:
        """Note that the optimizer has stepped: the next `begin` starts the next step."""
        self._is_complete = True

    def next(self) -> None:
        """End the step in progress and begin the next one: the optimizer has stepped."""
        if self.step is not None:
            self.complete()
            self.begin(self.step + 1)

    def release(self) -> None:
        """End the training. A step that is not complete is dropped."""
        global _marking
        if _marking is self:
            self.end_microbatch()
            if self._is_complete:
                step_end()
            self.step, self._is_complete = None, False
            _marking = None
            mark_evaluations(False)

    # Parts of a step

    def forward(self) -> None:
        """Begin the forward pass of the next microbatch."""
        self._begin_part(Op.FORWARD)

    def backward(self) -> None:
        """Begin the backward pass of this microbatch, and end its forward pass."""
        self._end_part(Op.FORWARD)
        self._begin_part(Op.BACKWARD)

    def end_microbatch(self) -> None:
        """End the microbatch and the pass in progress."""
        if self._end_part(Op.FORWARD) or self._end_part(Op.BACKWARD):
            self._microbatch += 1

    def begin_evaluation(self) -> None:
        """Begin an evaluation, in a training or outside."""
        if Op.EVALUATE not in self._parts:
            self._parts[Op.EVALUATE] = evaluate()
            self._parts[Op.EVALUATE].__enter__()

    def end_evaluation(self) -> None:
        """End the evaluation."""
        self._end_part(Op.EVALUATE)

    def _begin_part(self, op: Op) -> None:
        if _marking is self and op not in self._parts:
            self._parts[op] = pipelining(op, microbatch=self._microbatch)
            self._parts[op].__enter__()

    def _end_part(self, op: Op) -> bool:
        part = self._parts.pop(op, None)
        if part is not None:
            part.__exit__(None, None, None)
        return part is not None


def _completed() -> int | None:
    return None if _marking is None else _marking.completed


def never_raises(method: Callable[P, object]) -> Callable[P, None]:
    """Log an error of an adapter's callback once, and hide it from the framework.

    Only `NotResumedError` passes.
    """

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except NotResumedError:
            raise
        except Exception as error:
            log_once(method.__qualname__, "paceline: %s failed: %s", method.__qualname__, error)

    return guarded


def surround(owner: Any, name: str, timed: Callable[..., Timed | None]) -> None:
    """Run a function of a framework inside `timed(*args)`, however often this is called.

    Args:
        owner: the class or module that has the function; other versions may lack it.
        name: of the function.
        timed: returns what times the call; None: nothing.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with open_timed(timed, *args):
                return original(*args, **kwargs)

        return run

    replace(owner, name, make, by=timed)


def follow(
    owner: Any, name: str, call: Callable[..., object], arguments: tuple[str, ...] = ()
) -> None:
    """Call `call(*args)` after a function of a framework has returned, as `surround` does.

    `arguments`: of a method; then `call` gets its object and these only, or None for each that was
    not given.
    """
    guarded = never_raises(call)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        places = dict(zip(signature(original).parameters, count(), strict=False))

        def given(argument: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = places.get(argument, len(args))
            return args[place] if place < len(args) else kwargs.get(argument)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if arguments:
                guarded(args[0], *(given(each, args, kwargs) for each in arguments))
            else:
                guarded(*args)
            return result

        return run

    replace(owner, name, make, by=call)


def save_or_load(*_: object) -> Timed:
    """Return what times a checkpoint that the adapter reports itself; for `surround`."""
    return framework_checkpoint()


def open_timed(timed: Callable[..., Timed | None], *args: Any) -> Timed:
    """Return `timed(*args)`; what does nothing if there is nothing to time, or for an error."""
    try:
        return timed(*args) or INERT
    except Exception as error:
        log_once(timed.__qualname__, "paceline: %s failed: %s", timed.__qualname__, error)
        return INERT


class LeadingOptimizer:
    """The optimizer whose steps are counted, where a script has several: the first that steps.

    Another one replaces it once it has stepped `MOST_STEPS_OF_OTHERS` times without it: the script
    has begun a phase that trains something else. An engine that contains its optimizer counts as
    one.
    """

    def __init__(self) -> None:
        self._optimizer: Callable[[], Any] = lambda: None
        self._steps_of_others = 0  # since the last one of the optimizer

    def reset(self, *_: Any) -> None:
        """Choose again: other optimizers were set up."""
        self._optimizer = lambda: None

    def may_be(self, optimizer: Any) -> bool:
        """Return whether this optimizer's steps are counted, or those of none so far."""
        return self._optimizer() in (None, optimizer)

    def is_it(self, optimizer: Any) -> bool:
        """Return whether the steps of this optimizer, which has stepped, are counted."""
        if self._optimizer() is not optimizer:
            self._steps_of_others += 1
            if self._optimizer() is not None and self._steps_of_others <= MOST_STEPS_OF_OTHERS:
                return False
            self._optimizer = weakref.ref(optimizer)
        self._steps_of_others = 0
        return True


class Between:
    """A context manager that calls one function at its begin and another at its end."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._begin = never_raises(begin)
        self._end = never_raises(end)

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        self._end()
