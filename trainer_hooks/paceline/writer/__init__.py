"""The hot path: `_native.c` where it was built for this version, else the same in Python.

`PACELINE_PURE_PYTHON=1` asks for the latter. A build of another interface or layout, as an
editable install may keep, is not used. `Collective` is there only where it was built: in Python a
collective is timed the general way.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.writer.pure import Channel, Pipelining, Section, Writer
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

__all__ = ["Channel", "Collective", "Pipelining", "Section", "Writer"]

INTERFACE = 3  # as in _native.c
LAYOUT = (
    INTERFACE,
    *(STATE_HEAD, STATE_STEP, STATE_STEP_STARTED_NS, STATE_MICROBATCH),
    *(STATE_LOSS_STEP, STATE_LOSS, STATE_GRADIENT_NORM, STATE_DEPTH),
    *(STATE_EVALUATION_STEP, STATE_EVALUATION_LOSS, STATE_FRAMES),
    *(FRAMES, FRAME_WORDS, GROUP_BYTES_SHIFT, WORDS, int(Op.STEP), int(Op.DATA_WAIT)),
)


def _built() -> Any | None:
    if os.environ.get("PACELINE_PURE_PYTHON"):
        return None
    try:
        from paceline.writer import _native  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        return None
    return _native if _native.LAYOUT == LAYOUT else None


Collective: Any = None
if not TYPE_CHECKING and (_native := _built()) is not None:
    Channel, Collective, Writer = _native.Channel, _native.Collective, _native.Writer
    Pipelining, Section = _native.Pipelining, _native.Section
