"""The last lines of a training under `paceline watch`: the problems that were found in it.

They are printed by the first process that imports torch, and not by those that it starts: by
torchrun, also if a shell script calls it. If an error ends it, such as one of torchrun after a rank
has failed, the reason may just be found: it waits some seconds for the end of the training. If no
training was recorded, it says so. The problems that an external server finds are not known here:
after ranks have failed, torchrun prints its address.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

# Path of the file that `paceline_cli.watched` writes, or the address of another server.
VARIABLE = "PACELINE_WATCH_RESULT"
WANTED = ".wanted"  # suffix of the file that has the result written at once
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # not all print
_NEW_SECONDS = 30.0  # a server rewrites the file every five seconds
_MOST_BYTES = 1 << 24
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0  # for the server to find out why the ranks ended
_KNOWN_SECONDS = 1.0  # until the server knows of a training that has just begun
_NOTHING_RECORDED = (
    "no training was recorded: no process joined a process group, made a step with an optimizer "
    "of torch, or 64 backward passes. `paceline.init()` records a training from its call on"
)
# Attributes of the exceptions of torchrun: after a signal to it, and after a rank has failed.
_SIGNAL_OF_TORCHRUN = "sigval"
_FAILURES_OF_TORCHRUN = "failures"


def show_at_exit(is_rank: Callable[[], bool]) -> None:
    """Print them at the end of this process, and of no process that it starts.

    Args:
        is_rank: returns whether this process is itself a rank. Then nobody knows of its end yet.
    """
    path = os.environ.pop(VARIABLE, None)
    if not path or any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return
    if path.startswith(("http://", "https://")):
        atexit.register(_show_server, path, os.getpid())
    else:
        atexit.register(_show_at_exit, path, os.getpid(), time.time(), is_rank)


def _show_server(address: str, pid: int) -> None:
    """Print where the reason is shown, if this process is torchrun, whose ranks have failed."""
    has_failed = hasattr(getattr(sys, "last_value", None), _FAILURES_OF_TORCHRUN)
    if has_failed and os.getpid() == pid:  # not a forked child
        with suppress(OSError):
            sys.stderr.write(f"paceline: {address} shows why it ended\n")


def _show_at_exit(path: str, pid: int, since: float, is_rank: Callable[[], bool]) -> None:
    error = getattr(sys, "last_value", None)
    was_signaled = isinstance(error, KeyboardInterrupt) or hasattr(error, _SIGNAL_OF_TORCHRUN)
    is_complete = True
    if not was_signaled and os.getpid() == pid and not is_rank():
        with suppress(Exception, KeyboardInterrupt):
            if error is not None:
                has_ranks = hasattr(error, _FAILURES_OF_TORCHRUN)
                is_complete = _await_end(path, since, has_ranks=has_ranks)
            elif _is_without_training(path, since):
                sys.stderr.write(f"paceline: {_NOTHING_RECORDED}\n")
    show(path, pid, since, is_complete=is_complete)


def _await_end(path: str, since: float, *, has_ranks: bool) -> bool:
    """Wait until the result has the end of all trainings of this command. Return whether it has.

    Args:
        path: of the file that `paceline_cli.watched` writes. Its server may just be starting.
        since: see `show`.
        has_ranks: whether there is a training, also if the result does not know of it yet.
    """
    began = time.time()
    for written, jobs in _newer_results(path, since):
        if not has_ranks and time.time() - written > _NEW_SECONDS:  # no local server writes it
            return True
        is_known = bool(jobs) or not has_ranks
        if written > began and is_known and all(each.get("ended", True) for each in jobs):
            return True
    return False


def _is_without_training(path: str, since: float) -> bool:
    """Return whether a server that runs knows of no training of this command."""
    began = time.time()
    for written, jobs in _newer_results(path, since):
        if jobs or time.time() - written > _NEW_SECONDS:
            return False
        if written > began + _KNOWN_SECONDS:
            return True
    return False


def _newer_results(path: str, since: float) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield what `_read` returns, and have the result written again, for `_END_SECONDS`."""
    began = time.time()
    while time.time() - began < _END_SECONDS:
        yield _read(path, since)
        with open(path + WANTED, "w", encoding="utf-8"):
            time.sleep(_POLL_SECONDS)


def show(path: str, pid: int, since: float, *, is_complete: bool = True) -> None:
    """Print the problems of a result, if it is new and this process is the one with this id.

    Args:
        path: of the file that `paceline_cli.watched` writes.
        pid: of the process that prints.
        since: only those of jobs that began later, in seconds since the epoch.
        is_complete: whether the end of the training is analyzed, if an error ended it.
    """
    if os.getpid() != pid:  # a forked child
        return
    with suppress(Exception):
        written, jobs = _read(path, since)
        jobs = jobs if time.time() - written < _NEW_SECONDS else []
        lines = [
            f"{job['job']}: {line}" if len(jobs) > 1 else line
            for job in jobs
            for line in job["lines"]
        ]
        if not is_complete:
            lines.append("why it ended is not known yet: ask `paceline watch` again in a minute")
        elif jobs:
            lines.append("`paceline watch` shows what was found in this training")
        for line in lines:
            printable = "".join(each if each.isprintable() else "?" for each in line)
            sys.stderr.write(f"paceline: {printable}\n")


def _read(path: str, since: float) -> tuple[float, list[dict[str, Any]]]:
    """Return when a result was written, and the problems of the jobs that began since then.

    Without a result, the time is 0.
    """
    try:
        with open(path, encoding="utf-8") as file:
            problems = json.loads(file.read(_MOST_BYTES))["problems"]
            written = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0, []
    return written, [each for each in problems if each["created"] >= since]
