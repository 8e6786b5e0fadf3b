"""Keeps torch.compile from compiling Paceline.

A function that torch.compile cannot compile as a whole, such as a training step that calls
`backward()`, is interrupted there. All that Python runs in between is compiled, function by
function. Those of Paceline keep counters, which differ in each step: they would be compiled again
in each of the first steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_PACKAGES = ("paceline", "paceline_wire", "paceline_autostart")
_left: set[str] = set()  # names of the modules whose functions are left uncompiled


def leave_uncompiled(torch: Any) -> None:
    """Have torch run the functions of all modules of Paceline that are loaded now as they are.

    Raises AttributeError if this torch has no such setting.
    """
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)  # what they call is compiled
    for name in [each for each in sys.modules if each.partition(".")[0] in _PACKAGES]:
        if name not in _left:
            _left.add(name)
            for code in _codes_of(sys.modules[name], name):
                frames.set_code_exec_strategy(code, strategy)


def _codes_of(owner: Any, module: str) -> Iterator[CodeType]:
    """Yield the code of the functions that a module or class defines."""
    for value in list(vars(owner).values()):
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for each in parts:
            function = getattr(each, "__func__", each)
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield from _nested(function.__code__)
            elif isinstance(each, type) and each.__module__ == module:
                yield from _codes_of(each, module)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _nested(each)
