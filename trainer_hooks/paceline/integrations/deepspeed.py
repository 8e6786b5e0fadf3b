"""DeepSpeed: its engine, which has no callbacks of its own.

    import paceline.integrations.deepspeed

before `deepspeed.initialize`, or `PACELINE=1` without a line. A step is one step of the optimizer,
with all batches of its gradient accumulation; its number is `engine.global_steps`. Of several
engines that train (PPO, GAN), the first that steps is counted.
"""

from __future__ import annotations

import os
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from paceline.hooks import checkpoint_saved, optimizer
from paceline.integrations.boundaries import (
    Between,
    LeadingOptimizer,
    StepBoundaries,
    follow,
    save_or_load,
    surround,
)
from paceline.writer.interface import Timed

_boundaries = StepBoundaries()
_leading = LeadingOptimizer()


def _begin(engine: Any) -> None:
    if _boundaries.claim() and _leading.may_be(engine):
        _count(engine)


def _count(engine: Any) -> None:
    if _boundaries.step != engine.global_steps:
        _boundaries.complete()  # a checkpoint was loaded, or `step` was
        _boundaries.begin(engine.global_steps)


def _forward(engine: Any, *_: Any) -> Timed | None:
    if not engine.training or _is_pipeline(engine):
        return None
    _begin(engine)
    return Between(_boundaries.forward, lambda: None)


def _backward(engine: Any, *_: Any) -> Timed | None:
    if _is_pipeline(engine):
        return None
    _begin(engine)
    return Between(_boundaries.backward, _boundaries.end_microbatch)


def _stepped(engine: Any, *_: Any) -> None:
    if _boundaries.are_marked and not _is_pipeline(engine) and _leading.is_it(engine):
        _count(engine)


def _is_pipeline(engine: Any) -> bool:
    return hasattr(engine, "train_batch")


def _optimizer(*_: Any) -> Timed:
    return optimizer()


def _saved(engine: Any, directory: Any, tag: Any) -> None:
    if _boundaries.are_marked:
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        checkpoint_saved(engine.global_steps, os.path.join(directory, name))


def attach(_: object) -> None:
    """Do nothing: importing this module is enough."""


follow(DeepSpeedEngine, "__init__", _leading.reset)
surround(DeepSpeedEngine, "forward", _forward)
surround(DeepSpeedEngine, "backward", _backward)
surround(DeepSpeedEngine, "_take_model_step", _optimizer)
follow(DeepSpeedEngine, "step", _stepped)
surround(DeepSpeedEngine, "save_checkpoint", save_or_load)
follow(DeepSpeedEngine, "save_checkpoint", _saved, arguments=("save_dir", "tag"))
surround(DeepSpeedEngine, "load_checkpoint", save_or_load)
