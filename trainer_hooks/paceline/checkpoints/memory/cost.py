"""The cost of a thread of Paceline: the processor time that others of the host lack because of it.

The training does not wait for the thread. But on a host of few processors, something else may wait
for the one that it uses (PSI), and a processor is slower while the other hyperthread of its core is
busy. Both are counted while the thread works, not before: a training that waits for an accelerator
or for a network then loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import monotonic, thread_time
from typing import NamedTuple

_SIBLING_LOSS = 0.2  # share that a busy hyperthread loses while the other one of its core is busy
_IDLE_SECONDS = 0.1  # the least for which the host's idle time, in units of 10 ms, is of use
_MOST_BYTES = 256


class HostUse(NamedTuple):
    """Clocks of the host, all in seconds from some time on; None: not known."""

    now: float
    idle: float | None  # sum over the processors
    waited: float | None  # in which something waited for a processor

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> HostUse:
        return cls(monotonic(), _idle(proc), _waited(proc))


class Work:
    """The work of a thread, from the creation of this object on."""

    def __init__(self) -> None:
        self._before, self._begin = HostUse.read(), thread_time()

    def lost_seconds(self) -> float:
        """Return what it has cost so far, as the function of this name. Called by that thread."""
        own = thread_time() - self._begin
        return lost_seconds(self._before, HostUse.read(), own)


def lost_seconds(before: HostUse, after: HostUse, own: float) -> float:
    """Return the processor time that others have lost, for each rank of this node.

    All ranks of a node make their copies at the same time, each with one such thread. The kernel
    uses idle cores first: as long as half of the processors are idle, no core is shared.

    Args:
        before: when the thread began.
        after: when it was done.
        own: its processor time in seconds.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    processors = os.cpu_count() or 1
    passed = after.now - before.now
    available = processors * passed
    if available <= 0.0:
        return 0.0
    idle = 0.0 if before.idle is None or after.idle is None else after.idle - before.idle
    busy = min(available, max(0.0, available - idle))
    work = own * max(1.0, ranks / processors)  # until all of these threads are done
    most = work
    if passed >= _IDLE_SECONDS:
        most = min(most, max(0.0, busy - ranks * own) / ranks)  # what the training had
    shared = max(0.0, 2 * busy / available - 1) * most
    if before.waited is None or after.waited is None:
        return shared  # all of it is counted, because waits are not
    waiting = min(1.0, (after.waited - before.waited) / passed)
    return max(min(most, work * waiting), _SIBLING_LOSS * shared)


def _idle(proc: Path) -> float | None:
    return _number(proc / "uptime", lambda words: float(words[1]))


def _waited(proc: Path) -> float | None:
    """Return `total` of the first line, "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"."""
    return _number(proc / "pressure/cpu", lambda words: int(words[4].removeprefix(b"total=")) / 1e6)


def _number(path: Path, of: Callable[[list[bytes]], float]) -> float | None:
    """Return the number in a file's words; None if it is missing, or something else."""
    for _ in range(2):
        try:
            return of(os.pread(_opened(path), _MOST_BYTES, 0).split())
        except (OSError, ValueError, IndexError):
            _opened.cache_clear()  # a script that closes all files has closed this one, too
    return None


@cache
def _opened(path: Path) -> int:
    """Open a file for good: the kernel takes ten times as long to open it as to read it again."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
