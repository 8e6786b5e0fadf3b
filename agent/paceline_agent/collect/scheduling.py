"""How long threads run or wait for a CPU: what a call that is stuck in a driver does not do.

On a host that is short of CPU every call is late. Only one that neither runs nor waits for a CPU is
stuck. Sources: `/proc/PID/task/TID/schedstat`, nanoseconds of running and waiting, the latter
counted when the wait ends; and the state in `/proc/PID/task/TID/stat`, for a wait that goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_RUNNABLE_SHARE = 0.2  # of the time for which a call is watched: it is not stuck


class Runnable(NamedTuple):
    """The time for which threads were runnable so far, in sum, and whether one is now."""

    seconds: float
    is_now: bool


def process_runnable(pid: int) -> Runnable | None:
    """Return for how long the threads of a process have run or waited for a CPU.

    None if the kernel does not count it (CONFIG_SCHED_INFO) or the process has ended. The time of
    threads that ended meanwhile is missing.
    """
    try:
        return _sum(pid, map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return None


def thread_runnable(native_id: int) -> Runnable | None:
    """Return the same of one thread of this process."""
    return _sum(os.getpid(), [native_id])


def is_starved(before: Runnable | None, after: Runnable | None, elapsed_seconds: float) -> bool:
    """Return whether a call is late but not stuck, from its state before and after.

    Fewer seconds than before are those of other threads: the call moved on.
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
    with contextlib.suppress(OSError, ValueError, IndexError):
        running, waiting, *_ = (directory / "schedstat").read_bytes().split()
        state = (directory / "stat").read_bytes().rpartition(b") ")[2][:1]
        return Runnable((int(running) + int(waiting)) / 1e9, state == b"R")
    return None
