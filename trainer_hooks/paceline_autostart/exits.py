"""The ends of a process: the usual one, `os._exit` after an error, and Ctrl-C that torch handles.

A script's own `sys.excepthook` may call `os._exit`, so that no thread keeps the process alive and
the other ranks end too. Then nothing that was registered with `atexit` runs. A process of
`torch.multiprocessing.spawn` exits with 0 after Ctrl-C, as one does that has finished.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import wraps
from multiprocessing import parent_process
from typing import Any, NoReturn


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

    report_and_end.__module__ = os.__name__  # where pickle looks for it, not in `posix`
    os._exit = report_and_end


def before_interrupt(spawn: Any, report: Callable[[BaseException], None]) -> None:
    """Call `report` with the `KeyboardInterrupt` that ends a spawned process.

    The kernel also interrupts such a process when the one that spawned it has ended; then `report`
    gets an error about that.

    Args:
        spawn: the module `torch.multiprocessing.spawn`.
    """
    run = spawn._wrap

    @wraps(run)
    def run_and_report(function: Callable[..., Any], *args: Any) -> Any:
        def call(*inputs: Any) -> Any:
            try:
                return function(*inputs)
            except KeyboardInterrupt as error:
                parent = parent_process()
                if parent is None or parent.is_alive():
                    report(error)
                else:
                    report(ChildProcessError("the process that spawned this rank has ended"))
                raise

        return run(call, *args)

    spawn._wrap = run_and_report
