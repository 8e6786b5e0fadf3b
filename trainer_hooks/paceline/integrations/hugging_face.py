"""Hugging Face Transformers: a `TrainerCallback`.

    from paceline.integrations.hugging_face import PacelineCallback

    trainer = Trainer(..., callbacks=[PacelineCallback()])

With `PACELINE=1` it is one of the Trainer's default callbacks and needs no line. A step is one
optimizer step, with all batches of its gradient accumulation; its number is `state.global_step`.
A request of the server becomes `control.should_save` and `control.should_training_stop`; the script
resumes with `trainer.train(resume_from_checkpoint=True)`.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from transformers.trainer import DEFAULT_CALLBACKS, Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from paceline.hooks import checkpoint_saved, evaluate, expect_steps, report
from paceline.integrations.boundaries import (
    Between,
    StepBoundaries,
    never_raises,
    save_or_load,
    surround,
)
from paceline.requests import should_checkpoint, should_stop
from paceline.writer.interface import Timed


class PacelineCallback(TrainerCallback):  # type: ignore[misc]
    """Records the steps, evaluations, checkpoints and losses of a `Trainer`."""

    # Shared by all callbacks: a Trainer may have a default one and one of the script.
    _boundaries = StepBoundaries(with_evaluations=True)

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._boundaries.take()
        self._boundaries.resume(state.global_step)
        expect_steps(state.max_steps)

    @never_raises
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._boundaries.begin(state.global_step)

    @never_raises
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._boundaries.begin(state.global_step)

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._boundaries.complete()
        if self._boundaries.are_marked:
            if should_checkpoint(state.global_step):
                control.should_save = True
            if not control.should_save and should_stop(state.global_step):
                control.should_training_stop = True

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and self._boundaries.are_marked:
            report(logs.get("loss"), logs.get("grad_norm"), logs.get("eval_loss"))

    @never_raises
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:  # other ranks return before the files are complete
            folder = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            checkpoint_saved(state.global_step, os.path.join(args.output_dir, folder))
        if self._boundaries.are_marked and should_stop(state.global_step):
            control.should_training_stop = True

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._boundaries.release()


def attach(_: object) -> None:
    """Make the callback a default of every Trainer."""
    if PacelineCallback not in DEFAULT_CALLBACKS:
        DEFAULT_CALLBACKS.append(PacelineCallback)


_boundaries = PacelineCallback._boundaries


def _data(trainer: Any, *_: Any) -> None:
    _boundaries.begin(trainer.state.global_step)


def _microbatch(*_: Any) -> Between:
    return Between(_boundaries.forward, _boundaries.end_microbatch)


def _backward(*_: Any) -> Between:
    return Between(_boundaries.backward, _boundaries.end_microbatch)


def _evaluation(*_: Any) -> Timed:
    return evaluate()


# No event marks these.
surround(Trainer, "get_batch_samples", _data)
surround(Trainer, "training_step", _microbatch)
surround(Accelerator, "backward", _backward)
surround(Trainer, "evaluate", _evaluation)
surround(Trainer, "predict", _evaluation)
surround(Trainer, "_save_checkpoint", save_or_load)
