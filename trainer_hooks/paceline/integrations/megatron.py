"""Megatron-core: its schedules, its optimizers and its checkpoints, which have no callbacks.

    export PACELINE=1

Without the variable, call `paceline.integrations.megatron.attach(module)` for the modules that
`attach` names. A step begins with its schedule and ends when the next one begins; a schedule that
only runs forward is an evaluation. Each forward and backward pass has its microbatch, and its chunk
of the model if the schedule is interleaved. Steps are counted from 0 in each process: the number of
iterations belongs to the training script.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from paceline.hooks import checkpoint_saved, evaluate, optimizer, pipelining
from paceline.integrations.boundaries import (
    StepBoundaries,
    never_raises,
    open_timed,
    save_or_load,
    surround,
)
from paceline.sections import INERT
from paceline.wrapping import after, replace
from paceline.writer.interface import Timed
from paceline_wire.spans import Op

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")


class MegatronSteps:
    """The steps of a training whose loop calls a schedule and an optimizer."""

    def __init__(self) -> None:
        self._boundaries = StepBoundaries()
        self.count = 0  # completed
        self._evaluates = False
        self._optimizers = 0  # nested: one may consist of several
        # (microbatch, chunk) by the output that a forward pass returned and the backward pass gets.
        self._outputs: dict[int, tuple[int | None, int]] = {}

    def schedule(self, options: dict[str, Any]) -> Timed:
        """Begin a step, or an evaluation, with its schedule."""
        self._outputs.clear()
        self._evaluates = bool(options.get("forward_only"))
        if self._evaluates:
            return evaluate()
        if self._boundaries.claim():
            self._boundaries.begin(self.count)
        return INERT

    @never_raises
    def complete(self) -> None:
        """End the step with the next schedule, or with the process."""
        if self._boundaries.step == self.count:
            self.count += 1
            self._boundaries.complete()

    def forward(self, options: dict[str, Any]) -> Timed:
        """Return what times a forward pass; those of an evaluation are part of it."""
        if self._evaluates:
            return INERT
        microbatch, chunk = _place(options)
        return pipelining(Op.FORWARD, microbatch=microbatch, chunk=chunk)

    @never_raises
    def keep_output(self, result: Any, options: dict[str, Any]) -> None:
        """Note which microbatch an output belongs to."""
        if self._evaluates:
            return
        output = result[0]
        self._outputs[id(output[0] if isinstance(output, list) else output)] = _place(options)

    def backward(self, output: Any) -> Timed:
        """Return what times the backward pass of an output."""
        output = output[0] if isinstance(output, list) else output
        microbatch, chunk = self._outputs.pop(id(output), (None, 0))
        return pipelining(Op.BACKWARD, microbatch=microbatch, chunk=chunk)

    @property
    def is_in_optimizer(self) -> bool:
        """Whether an optimizer of Megatron-core is at work."""
        return self._optimizers > 0

    def begin_optimizer(self) -> Timed:
        """Return what times the optimizer; nothing for one that another consists of."""
        self._optimizers += 1
        return optimizer() if self._optimizers == 1 else INERT

    @never_raises
    def end_optimizer(self) -> None:
        """Complete the step, after the outermost optimizer."""
        self._optimizers -= 1
        if not self._optimizers:
            self.complete()

    def release(self) -> None:
        """End the training at the end of the process."""
        self._boundaries.release()


def _place(options: dict[str, Any]) -> tuple[int | None, int]:
    return options.get("current_microbatch"), options.get("vp_stage") or 0


_steps = MegatronSteps()
atexit.register(_steps.release)  # before the hooks' own, which was registered earlier


def _saved(asynchronous: Any, _: Any, path: Any = None, *__: Any) -> None:
    """Report a checkpoint that was complete when the call returned."""
    if asynchronous is None:
        checkpoint_saved(_steps.count, path)


def _after_optimizer(*_: Any) -> None:
    """Complete the step of a loop that uses an optimizer of torch."""
    if not _steps.is_in_optimizer:
        _steps.complete()


def attach(module: ModuleType) -> None:
    """Record what a module of Megatron-core does: `schedules`, `optimizer` or `dist_checkpointing`.

    Args:
        module: `megatron.core.pipeline_parallel.schedules`, `megatron.core.optimizer.optimizer` or
            `megatron.core.dist_checkpointing`.
    """
    if module.__name__.endswith(".schedules"):
        for name in SCHEDULES:
            replace(module, name, _schedule)
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_post_hook(_after_optimizer)
        replace(module, "forward_step", _forward)
        replace(module, "backward_step", _backward)
    elif module.__name__.endswith(".optimizer"):
        for name in OPTIMIZERS:
            if hasattr(module, name):
                replace(getattr(module, name), "step", _optimizer)
    else:
        surround(module, "save", save_or_load)
        after(module, "save", _saved)


Function = Callable[..., Any]


def _schedule(original: Function) -> Function:
    def run_schedule(*args: Any, **options: Any) -> Any:
        with open_timed(_steps.schedule, options):
            return original(*args, **options)

    return run_schedule


def _forward(original: Function) -> Function:
    def forward_step(*args: Any, **options: Any) -> Any:
        with open_timed(_steps.forward, options):
            result = original(*args, **options)
        _steps.keep_output(result, options)
        return result

    return forward_step


def _backward(original: Function) -> Function:
    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **options: Any) -> Any:
        with open_timed(_steps.backward, output_tensor):
            return original(input_tensor, output_tensor, *args, **options)

    return backward_step


def _optimizer(original: Function) -> Function:
    def step(*args: Any, **options: Any) -> Any:
        try:
            with open_timed(_steps.begin_optimizer):
                return original(*args, **options)
        finally:
            _steps.end_optimizer()

    return step
