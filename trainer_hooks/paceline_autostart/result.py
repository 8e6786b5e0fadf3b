"""The last lines of a training under `paceline watch`: the problems that were found in it.

They are printed by the first process that imports torch, and not by those that it starts: by
torchrun, also if a shell script calls it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from contextlib import suppress

VARIABLE = "PACELINE_WATCH_RESULT"  # path of the file that `paceline_cli.watched` writes
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # not all print
_NEW_SECONDS = 30.0  # a server rewrites the file every five seconds
_MOST_BYTES = 1 << 24


def show_at_exit() -> None:
    """Print them at the end of this process, and of no process that it starts."""
    path = os.environ.pop(VARIABLE, None)
    if path and all(os.environ.get(name, "0") == "0" for name in _RANKS):
        atexit.register(show, path, os.getpid(), time.time())


def show(path: str, pid: int, since: float) -> None:
    """Print the problems of a result, if it is new and this process is the one with this id.

    Args:
        path: of the file that `paceline_cli.watched` writes.
        pid: of the process that prints.
        since: only those of jobs that began later, in seconds since the epoch.
    """
    if os.getpid() != pid:  # a forked child
        return
    with suppress(Exception), open(path, encoding="utf-8") as file:
        if time.time() - os.fstat(file.fileno()).st_mtime > _NEW_SECONDS:
            return
        problems = json.loads(file.read(_MOST_BYTES))["problems"]
        jobs = [each for each in problems if each["created"] >= since]
        lines = [
            f"{job['job']}: {line}" if len(jobs) > 1 else line
            for job in jobs
            for line in job["lines"]
        ]
        if jobs:
            lines.append("`paceline watch` shows what was found in this training")
        for line in lines:
            printable = "".join(each if each.isprintable() else "?" for each in line)
            sys.stderr.write(f"paceline: {printable}\n")
