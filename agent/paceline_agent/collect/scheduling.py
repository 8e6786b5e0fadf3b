"""How long threads run or wait for a CPU, to distinguish a slow call from one stuck in a driver.

On a host that is short of CPU every call is late. A call is stuck only if it neither
runs nor waits for a CPU. Sources: `/proc/PID/task/TID/schedstat`, nanoseconds of running and
waiting, the latter counted when the wait ends; and the state in `/proc/PID/task/TID/stat`, for a
wait in progress. Without CONFIG_SCHED_INFO, `schedstat` is missing or has only zeros: then the CPU
time in `stat` is used, and a wait is visible only in the state.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_WATCHED_SECONDS = 0.5
_RUNNABLE_SHARE = 0.2  # share of the watched time


class Runnable(NamedTuple):
    """The total time for which threads were runnable, and whether one is runnable now."""

    seconds: float
    is_now: bool


def process_runnable(pid: int) -> Runnable | None:
    """Return how long the threads of a process have run or waited for a CPU.

    None if the process has ended. The time of threads that ended meanwhile is missing.
    """
    try:
        return _sum(pid, map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return None


def thread_runnable(native_id: int) -> Runnable | None:
    """Return the same for one thread of this process."""
    return _sum(os.getpid(), [native_id])


def watched_seconds(deadline_seconds: float) -> float:
    """Return how long a call is observed at the end of its deadline, to see whether it is stuck."""
    return min(_WATCHED_SECONDS, deadline_seconds / 2)


def is_stuck(
    before: Runnable | None, after: Runnable | None, elapsed_seconds: float, planned_seconds: float
) -> bool:
    """Return whether a call without a result neither runs nor waits for a CPU.

    Args:
        before: its state at the begin of the time in which it was observed.
        after: its state at the end.
        elapsed_seconds: that time.
        planned_seconds: what it should have been. After a late timer, the result may have arrived
            without being read yet.
    """
    is_late = elapsed_seconds > 2 * planned_seconds
    return not is_late and not is_starved(before, after, elapsed_seconds)


def is_starved(before: Runnable | None, after: Runnable | None, elapsed_seconds: float) -> bool:
    """Return whether a call is late but not stuck, from its state before and after.

    Fewer seconds than before belong to other threads, so the call has progressed.
    """
    if before is None or after is None:
        return False
    ran = after.seconds - before.seconds
    return after.is_now or ran < 0 or ran >= _RUNNABLE_SHARE * elapsed_seconds


def _sum(pid: int, threads: Iterable[int]) -> Runnable | None:
    found = [each for thread in threads if (each := _of_thread(pid, thread)) is not None]
    if not found:
        return None
    return Runnable(sum(each.seconds for each in found), any(each.is_now for each in found))


def _of_thread(pid: int, thread: int) -> Runnable | None:
    directory = Path(f"/proc/{pid}/task/{thread}")
    try:
        stat = (directory / "stat").read_bytes()
    except OSError:
        return None
    schedstat = b""
    with contextlib.suppress(OSError):
        schedstat = (directory / "schedstat").read_bytes()
    return parse(stat, schedstat)


def parse(stat: bytes, schedstat: bytes) -> Runnable:
    """Return how long a thread was runnable, from `stat` and `schedstat`, which may be empty."""
    fields = stat.rpartition(b") ")[2].split()  # from the third, after a name with any bytes
    nanoseconds = sum(map(int, schedstat.split()[:2]))
    seconds = nanoseconds / 1e9 or (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return Runnable(seconds, fields[0] == b"R")
