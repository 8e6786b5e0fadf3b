"""The frame of a Python stack that belongs to the training script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from paceline_wire.stacks import CALLERS, StackFrame

_LIBRARIES = CALLERS | {"typing_extensions", *sys.stdlib_module_names}


def script_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Return the innermost frame of the script; without one, of a package that torch calls.

    `frames`: innermost first.
    """
    own = (each for each in frames if not each.is_installed and _package(each) not in CALLERS)
    called = (each for each in frames if _package(each) not in _LIBRARIES)
    return next(chain(own, called, frames), None)


def _package(frame: StackFrame) -> str:
    return frame.file.partition("/")[0].removesuffix(".py")
