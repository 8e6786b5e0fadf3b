"""torchtitan: a handler of its structured logger, which marks the begin and end of each phase.

    export TITAN_STRUCT_LOGGER_HANDLERS=\
    torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler,\
    paceline.integrations.torchtitan.register

torchtitan runs only the handlers that are listed, so its own is listed too. With `PACELINE=1` the
handler needs no line. Steps have torchtitan's numbers, from 1.
"""

from __future__ import annotations

import logging
import threading
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
from paceline.writer.interface import Timed

LOGGER = "torchtitan.structured_logger"

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


def attach(module: ModuleType) -> None:
    """Register with torchtitan's logger when it is initialized, whatever the variable lists."""
    initialize = module.init_structured_logger

    def init_structured_logger(source: str, *arguments: Any, **options: Any) -> None:
        initialize(source, *arguments, **options)
        register(logging.getLogger(LOGGER), source)

    module.init_structured_logger = init_structured_logger  # type: ignore[attr-defined]
