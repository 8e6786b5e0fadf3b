"""Record a distributed training run from inside each rank.

    import paceline

    paceline.init()
    for batch in paceline.steps(loader):
        ...

is enough. Without an agent on this node the hooks do nothing, and log that once. During a step the
hooks do no I/O, take no lock and start no thread. They never raise an error into the training: an
error of Paceline is counted and logged once.
"""

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
from paceline_wire.ring import AckStatus, Control, ControlKind
from paceline_wire.spans import Op

__all__ = [
    "AckStatus",
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
    "section",
    "step",
    "step_begin",
    "step_end",
    "steps",
]
