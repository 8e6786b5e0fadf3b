"""torchtitan: a handler of its structured logger, which marks the begin and end of each phase.

    export TITAN_STRUCT_LOGGER_HANDLERS=\
    torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler,\
    paceline.integrations.torchtitan.register

torchtitan runs only the handlers that are listed, so its own is listed too. With `PACELINE=1` the
handler needs no line. Steps have torchtitan's numbers, from 1.

A request of the server becomes a checkpoint of torchtitan's own, after a step that has none by its
interval, and the end of its loop. The number of completed steps that is reported for it is that of
the next step, as Paceline counts them. Only with `--checkpoint.enable`, and `load_only` off.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from paceline.hooks import (
    autostart,
    checkpoint,
    data_wait,
    evaluate,
    optimizer,
    section,
    step_begin,
    step_end,
)
from paceline.integrations.boundaries import never_raises
from paceline.requests import framework_should_checkpoint, should_stop
from paceline.wrapping import replace
from paceline.writer.interface import Timed

LOGGER = "torchtitan.structured_logger"
CHECKPOINTER = "torchtitan.components.checkpointer.dcp"
TRAINER = "torchtitan.trainer"

_PHASES = {
    "fetching_batch": data_wait,
    "optim": optimizer,
    "eval": evaluate,
    "checkpoint_save": checkpoint,
}
# Other spans of a step, recorded as sections under torchtitan's names.
_SECTIONS = frozenset(
    {"fwd_bwd", "post_dataloading_process", "collect_dist_metrics", "gc_collect"},
)


class StructuredLogHandler(logging.Handler):
    """Records the spans that torchtitan logs as `NAME_start` and `NAME_end`."""

    def __init__(self) -> None:
        super().__init__()
        self._open = (
            threading.local()
        )  # spans of this thread: checkpoints may have one of their own

    def createLock(self) -> None:  # noqa: N802 - logging's name
        """Have no lock: there is no stream to share."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Open or close the span."""
        self._record(str(getattr(record, "log_type_name", "")), getattr(record, "step", None))

    @never_raises
    def _record(self, event: str, step: int | None) -> None:
        name, _, edge = event.rpartition("_")
        if name == "step":
            if edge == "start":
                step_begin(step)
            elif edge == "end":
                step_end()
        elif name in _PHASES or name in _SECTIONS:
            spans = self._spans()
            if edge == "start":
                span = _PHASES[name]() if name in _PHASES else section(name)
                spans.append((name, span))
                span.__enter__()
            elif edge == "end" and spans and spans[-1][0] == name:
                spans.pop()[1].__exit__(None, None, None)

    def _spans(self) -> list[tuple[str, Timed]]:
        try:
            return self._open.spans  # type: ignore[no-any-return]
        except AttributeError:
            self._open.spans = []
            return self._open.spans  # type: ignore[no-any-return]


def register(structured_logger: logging.Logger, source: str = "training", **_: Any) -> None:
    """Add the handler to torchtitan's logger; `TITAN_STRUCT_LOGGER_HANDLERS` names this function.

    Args:
        structured_logger: torchtitan's.
        source: the kind of process; only "training" has steps of an optimizer.
    """
    if source == "training":
        _add(structured_logger)


@never_raises
def _add(logger: logging.Logger) -> None:
    autostart()
    if not any(isinstance(handler, StructuredLogHandler) for handler in logger.handlers):
        logger.addHandler(StructuredLogHandler())
    for name in (CHECKPOINTER, TRAINER):
        if name in sys.modules:
            attach(sys.modules[name])


def attach(module: ModuleType) -> None:
    """Attach to a module: the logger, the manager of checkpoints or the trainer.

    The handler is registered when the logger is initialized, whatever the variable lists.
    """
    if module.__name__ == CHECKPOINTER:
        replace(module.CheckpointManager, "_should_save", _saves_on_request)
    elif module.__name__ == TRAINER:
        replace(module.Trainer, "should_continue_training", _stops_on_request)
    else:
        _register_at_start(module)


Function = Callable[..., Any]


def _saves(manager: Any) -> bool:
    return getattr(manager, "enable", False) and not getattr(manager, "load_only", True)


def _saves_on_request(original: Function) -> Function:
    def _should_save(manager: Any, curr_step: int, last_step: bool = False) -> bool:
        is_due = curr_step > 0 and _saves(manager) and framework_should_checkpoint()
        return bool(original(manager, curr_step, last_step)) or is_due

    return _should_save


def _stops_on_request(original: Function) -> Function:
    def should_continue_training(trainer: Any) -> bool:
        continues = bool(original(trainer))
        saves = _saves(getattr(trainer, "checkpointer", None))
        return continues and not (saves and should_stop())

    return should_continue_training


def _register_at_start(module: ModuleType) -> None:
    initialize = module.init_structured_logger

    def init_structured_logger(source: str, *arguments: Any, **options: Any) -> None:
        initialize(source, *arguments, **options)
        register(logging.getLogger(LOGGER), source)

    module.init_structured_logger = init_structured_logger  # type: ignore[attr-defined]
