"""The writer's end of a ring: in C if it was built, otherwise in Python.

    interface.py     values and protocols shared with the callers
    pure_python.py   the reference implementation, and the fallback
    _native.c        the same classes in C, for the hot path

Import the classes from this package; it selects the implementation once, at import. Set
`PACELINE_PURE_PYTHON=1` to force Python. A C build of another interface or layout, which an
editable install may leave behind, is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.environment import prefers_pure_python
from paceline.writer.pure_python import Channel, Pipelining, Section, Writer
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    GROUP_BYTES_SHIFT,
    STATE_DEPTH,
    STATE_EVALUATION_LOSS,
    STATE_EVALUATION_STEP,
    STATE_FRAMES,
    STATE_GRADIENT_NORM,
    STATE_HEAD,
    STATE_LOSS,
    STATE_LOSS_STEP,
    STATE_MICROBATCH,
    STATE_STEP,
    STATE_STEP_STARTED_NS,
)
from paceline_wire.spans import WORDS, Op

__all__ = ["Channel", "Pipelining", "Section", "Writer", "make_wait"]

INTERFACE = 6  # equals INTERFACE in _native.c
LAYOUT = (
    INTERFACE,
    *(STATE_HEAD, STATE_STEP, STATE_STEP_STARTED_NS, STATE_MICROBATCH),
    *(STATE_LOSS_STEP, STATE_LOSS, STATE_GRADIENT_NORM, STATE_DEPTH),
    *(STATE_EVALUATION_STEP, STATE_EVALUATION_LOSS, STATE_FRAMES),
    *(FRAMES, FRAME_WORDS, GROUP_BYTES_SHIFT, WORDS, int(Op.STEP), int(Op.DATA_WAIT)),
    int(Op.FORWARD),
)


def _load_native() -> Any | None:
    """Return the C module, or None if it is missing, outdated or not wanted."""
    if prefers_pure_python():
        return None
    try:
        from paceline.writer import _native  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        return None
    return _native if _native.LAYOUT == LAYOUT else None


make_wait: Any = None  # exists only in C
if not TYPE_CHECKING and (_native := _load_native()) is not None:
    Channel, Writer, make_wait = _native.Channel, _native.Writer, _native.make_wait
    Pipelining, Section = _native.Pipelining, _native.Section
