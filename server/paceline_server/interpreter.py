"""Settings of the Python interpreter for a process of the server."""

from __future__ import annotations

import gc
import sys


def tune_interpreter() -> None:
    """For threads that share one interpreter, and batches that make many objects and few cycles.

    Python's own pace would spend a third on looking for cycles; what is loaded by now stays, and
    need not be looked at at all. sqlite3 lets go of the interpreter at each row: a thread that
    reads a thousand would wait as often for a busy one, 5 ms each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(0.0005)
