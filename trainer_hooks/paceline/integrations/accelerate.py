"""Hugging Face Accelerate: a `GeneralTracker` for the values, and the Accelerator's own calls.

    from paceline.integrations.accelerate import PacelineTracker

    accelerator = Accelerator(..., log_with=PacelineTracker())

With `PACELINE=1` it needs no line. The loop is the script's, and so are its forward passes and
evaluations. A step ends when an optimizer of `accelerator.prepare` has stepped: once per gradient
accumulation. Accelerate counts no steps; after `load_state` the count of the optimizer is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker

from paceline.hooks import checkpoint_saved, given_step, report
from paceline.integrations.boundaries import (
    LeadingOptimizer,
    StepBoundaries,
    follow,
    never_raises,
    save_or_load,
    surround,
)
from paceline.saves import completed_steps
from paceline.wrapping import after


class PacelineTracker(GeneralTracker):  # type: ignore[misc]
    """Reports what the script logs as loss, gradient norm and evaluation loss."""

    name = "paceline"
    requires_logging_directory = False
    main_process_only = False

    @property
    def tracker(self) -> None:
        """There is no object behind this tracker."""

    @never_raises
    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Report the values whose names are known."""
        report(
            values.get("loss", values.get("train_loss")),
            values.get("grad_norm"),
            values.get("eval_loss", values.get("val_loss")),
        )


_boundaries = StepBoundaries()
_leading = LeadingOptimizer()


def _begin(accelerator: Any, *_: Any) -> None:
    if _boundaries.claim() and _boundaries.step is None:
        given = given_step()
        _boundaries.begin(completed_steps(accelerator._optimizers) if given is None else given)


def _stepped(optimizer: Any, *_: Any) -> None:
    synchronized = optimizer.gradient_state.sync_gradients
    if _boundaries.are_marked and synchronized and _leading.is_it(optimizer):
        _boundaries.next()


def _loaded(accelerator: Any, *_: Any) -> None:
    step = completed_steps(accelerator._optimizers)
    if _boundaries.are_marked and step != _boundaries.step:
        _boundaries.complete()
        _boundaries.begin(step)


def _saved(path: Any, accelerator: Any, *_: Any) -> None:
    # Other ranks return before its files are complete.
    if _boundaries.are_marked and _boundaries.step is not None and accelerator.is_main_process:
        checkpoint_saved(_boundaries.step, path)


def _track(accelerator: Any, *_: Any) -> None:
    if not any(isinstance(tracker, PacelineTracker) for tracker in accelerator.trackers):
        accelerator.trackers.append(PacelineTracker())


def _ended(*_: Any) -> None:
    _boundaries.release()


def attach(_: object) -> None:
    """Track what every Accelerator logs."""
    follow(Accelerator, "init_trackers", _track)


surround(Accelerator, "_do_sync", _begin)  # `accumulate` calls it before each batch
surround(Accelerator, "backward", _begin)
follow(AcceleratedOptimizer, "step", _stepped)
surround(Accelerator, "save_state", save_or_load)
after(Accelerator, "save_state", _saved)
surround(Accelerator, "save_model", save_or_load)
surround(Accelerator, "load_state", save_or_load)
follow(Accelerator, "load_state", _loaded)
follow(Accelerator, "prepare_optimizer", _leading.reset)
follow(Accelerator, "end_training", _ended)
