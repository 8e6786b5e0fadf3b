"""Record a distributed training run from inside each rank.

    import paceline

    paceline.init()
    for batch in paceline.steps(loader):
        ...

is enough. Without an agent on this node the hooks do nothing, and log that once. During a step the
hooks do no I/O, take no lock and start no thread. They never raise an error into the training: an
error of Paceline is counted and logged once.

`Checkpoints`, `should_checkpoint` and `should_stop` are for scripts that follow the server's
requests. They start a thread, which agrees with the other ranks on a step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.hooks import (
    acknowledge,
    checkpoint,
    checkpoint_failed,
    checkpoint_saved,
    count,
    data_wait,
    declare,
    describe_model,
    evaluate,
    finish,
    init,
    name_group,
    optimizer,
    pending,
    pipelining,
    report,
    section,
    step,
    step_begin,
    step_end,
    steps,
)
from paceline.renewal import resilient
from paceline.requests import should_checkpoint, should_stop
from paceline_wire.ring import AckStatus, Control, ControlKind
from paceline_wire.spans import Op

if TYPE_CHECKING:
    from paceline.checkpoints.checkpoints import Checkpoints

__all__ = [
    "AckStatus",
    "Checkpoints",
    "Control",
    "ControlKind",
    "Op",
    "acknowledge",
    "checkpoint",
    "checkpoint_failed",
    "checkpoint_saved",
    "count",
    "data_wait",
    "declare",
    "describe_model",
    "evaluate",
    "finish",
    "init",
    "name_group",
    "optimizer",
    "pending",
    "pipelining",
    "report",
    "resilient",
    "section",
    "should_checkpoint",
    "should_stop",
    "step",
    "step_begin",
    "step_end",
    "steps",
]


def __getattr__(name: str) -> Any:
    """Return `Checkpoints`, whose module imports torch.distributed.checkpoint, at its first use."""
    if name == "Checkpoints":
        return importlib.import_module("paceline.checkpoints.checkpoints").Checkpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
