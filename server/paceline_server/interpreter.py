"""Settings of the Python interpreter for a process of the server."""

from __future__ import annotations

import gc
import sys


def tune_interpreter() -> None:
    """Tune garbage collection and thread switching.

    Decoding batches allocates many objects and few cycles: with the default thresholds the
    collector takes a third of the CPU time. Modules loaded so far are excluded from collection.
    sqlite3 releases the GIL at each row, so a thread that reads 1,000 rows next to a busy thread
    would wait 1,000 times for the switch interval, by default 5 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(0.0005)
