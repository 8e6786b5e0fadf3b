"""The ends of a process: the usual one, and `os._exit` after an error.

A script's own `sys.excepthook` may call `os._exit`, so that no thread keeps the process alive and
the other ranks end too. Then nothing that was registered with `atexit` runs.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn


def before_exit(report: Callable[[], None]) -> None:
    """Call `report` at the end of the process, also before `os._exit` with the code of a failure
    while an exception is handled, or after one that nothing caught."""
    atexit.register(report)
    end = os._exit

    @wraps(end)
    def report_and_end(status: int) -> NoReturn:
        try:
            if status and (sys.exc_info()[1] is not None or hasattr(sys, "last_value")):
                report()
        finally:
            end(status)

    os._exit = report_and_end
