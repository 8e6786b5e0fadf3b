"""MosaicML Composer: a `Callback`.

    from paceline.integrations.composer import ComposerCallback

    trainer = Trainer(..., callbacks=[ComposerCallback()])

With `PACELINE=1` each Trainer has it and needs no line. A step is one batch of Composer, with all
its microbatches; its number is `state.timestamp.batch`.
"""

from __future__ import annotations

from typing import Any

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core.callback import Callback
from composer.trainer.trainer import Trainer

from paceline.hooks import checkpoint_saved, report
from paceline.integrations.boundaries import (
    StepBoundaries,
    follow,
    never_raises,
    save_or_load,
    surround,
)

# Shared by all callbacks: a Trainer may have a default one and one of the script.
_boundaries = StepBoundaries(with_evaluations=True)


class ComposerCallback(Callback):  # type: ignore[misc]
    """Records the steps, passes, evaluations, checkpoints and losses of a `Trainer`."""

    @never_raises
    def fit_start(self, state: Any, logger: Any) -> None:
        _boundaries.take()

    @never_raises
    def before_dataloader(self, state: Any, logger: Any) -> None:
        _boundaries.begin(state.timestamp.batch.value)

    @never_raises
    def before_forward(self, state: Any, logger: Any) -> None:
        _boundaries.forward()

    @never_raises
    def before_backward(self, state: Any, logger: Any) -> None:
        _boundaries.backward()

    @never_raises
    def after_backward(self, state: Any, logger: Any) -> None:
        _boundaries.end_microbatch()

    @never_raises
    def batch_end(self, state: Any, logger: Any) -> None:
        if _boundaries.are_marked:
            report(loss=state.total_loss_dict.get("loss/train/total"))
            _boundaries.complete()

    @never_raises
    def fit_end(self, state: Any, logger: Any) -> None:
        _boundaries.release()

    @never_raises
    def eval_start(self, state: Any, logger: Any) -> None:
        _boundaries.begin_evaluation()

    @never_raises
    def eval_end(self, state: Any, logger: Any) -> None:
        _boundaries.end_evaluation()

    predict_start, predict_end = eval_start, eval_end


def _saved(_: Any, state: Any, *__: Any) -> None:
    checkpoint_saved(state.timestamp.batch.value)


def _add_callback(trainer: Any, *_: Any) -> None:
    if not any(isinstance(each, ComposerCallback) for each in trainer.state.callbacks):
        trainer.state.callbacks.append(ComposerCallback())


def attach(_: object) -> None:
    """Add the callback to every Trainer."""
    follow(Trainer, "__init__", _add_callback)


surround(CheckpointSaver, "_save_checkpoint", save_or_load)
follow(CheckpointSaver, "_save_checkpoint", _saved)
