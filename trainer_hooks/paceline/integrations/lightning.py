"""Lightning: a `Callback`, in the entry-point group `lightning.pytorch.callbacks_factory`.

    from paceline.integrations.lightning import LightningCallback

    trainer = Trainer(..., callbacks=[LightningCallback()])

With `PACELINE=1`, or after `paceline.init()`, each Trainer has it and needs no line. A step is one
optimizer step, with all batches of its gradient accumulation; its number is `trainer.global_step`.
A request of the server becomes `last.ckpt` (`last-requested.ckpt`, if that is a link) beside the
Trainer's other checkpoints, from which `fit(ckpt_path="last")` resumes, and `trainer.should_stop`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from paceline.hooks import checkpoint_saved, expect_steps, report, stopping, terminated
from paceline.integrations.boundaries import (
    StepBoundaries,
    follow,
    never_raises,
    save_or_load,
    surround,
)
from paceline.requests import should_checkpoint, should_stop

# Two packages with the same content; the script uses one.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_package: Any = importlib.import_module(
    PACKAGES[1] if PACKAGES[1] in sys.modules and PACKAGES[0] not in sys.modules else PACKAGES[0]
)

# Shared by all callbacks: a Trainer may have one of the factory and one of the script.
_boundaries = StepBoundaries(with_evaluations=True)
_received_sigterm = False  # by this rank itself


class LightningCallback(_package.Callback):  # type: ignore[misc]
    """Records the steps, passes, evaluations, checkpoints and losses of a `Trainer`."""

    def __init__(self) -> None:
        super().__init__()
        for name in PACKAGES:
            if (package := sys.modules.get(name)) is not None:
                _watch(package)

    # Training

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _boundaries.take()
        _boundaries.resume(trainer.global_step)
        expect_steps(trainer.max_steps)  # -1: the epochs are limited

    @never_raises
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        _boundaries.begin(trainer.global_step)
        _boundaries.forward()

    @never_raises
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        _boundaries.backward()

    @never_raises
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        _boundaries.end_microbatch()

    @never_raises
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        _boundaries.end_microbatch()  # without a backward pass: `training_step` returned None
        if _boundaries.are_marked and trainer.global_step != _boundaries.step:
            report(loss=outputs.get("loss") if isinstance(outputs, dict) else outputs)
            _boundaries.complete()
            _follow_requests(trainer)

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _boundaries.release()

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        _boundaries.end_evaluation()
        _boundaries.release()
        # Lightning stops all ranks in good order if one of them received the signal.
        if _received_sigterm and type(exception).__name__ == "SIGTERMException":
            terminated(signal.SIGTERM)

    # Evaluations

    @never_raises
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:  # before the first step
            _boundaries.begin_evaluation()

    @never_raises
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        _boundaries.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end


def _follow_requests(trainer: Any) -> None:
    """Save where `fit(ckpt_path="last")` finds it, and stop, if the server requests it."""
    if should_checkpoint(trainer.global_step):
        own = trainer.checkpoint_callback
        directory = getattr(own, "dirpath", None) or trainer.default_root_dir
        trainer.save_checkpoint(os.path.join(directory, _name_of_last(trainer)))
    if should_stop(trainer.global_step):
        trainer.should_stop = True


def _name_of_last(trainer: Any) -> str:
    """Return a name that `ckpt_path="last"` finds.

    With `save_last="link"`, `last.ckpt` is a link: a save would replace the checkpoint behind it.
    """
    is_link = any(
        getattr(each, "save_last", None) == "link" for each in trainer.checkpoint_callbacks
    )
    return "last-requested.ckpt" if is_link else "last.ckpt"


def callbacks() -> list[LightningCallback]:
    """Return the callback of a new Trainer; the entry point calls it."""
    return [LightningCallback()]


def _watch(package: Any) -> None:
    """Time the parts that no event marks: the begin of a fetch, and checkpoints."""
    loop = sys.modules[f"{package.__name__}.loops.training_epoch_loop"]
    surround(loop._TrainingEpochLoop, "advance", _data)
    surround(package.Trainer, "save_checkpoint", save_or_load)
    signals = sys.modules[f"{package.__name__}.trainer.connectors.signal_connector"]
    surround(signals._SignalConnector, "_sigterm_notifier_fn", _receive_sigterm)
    follow(package.Trainer, "save_checkpoint", _saved, arguments=("filepath",))


def _data(loop: Any, *_: Any) -> None:
    _boundaries.begin(loop.trainer.global_step)


def _receive_sigterm(*_: Any) -> None:
    global _received_sigterm
    _received_sigterm = True
    stopping()


def _saved(trainer: Any, path: Any) -> None:
    plugin = trainer.strategy.checkpoint_io
    if not type(plugin).__name__.startswith("Async"):  # the files may not be complete yet
        checkpoint_saved(trainer.global_step, path)
