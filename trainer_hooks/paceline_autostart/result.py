"""The last lines of a command of `paceline watch`: the problems that were found in its training."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from contextlib import suppress

VARIABLE = "PACELINE_WATCH_RESULT"  # PID:PATH, as paceline_cli.watched sets it
_NEW_SECONDS = 30.0  # a server rewrites the file every five seconds
_MOST_BYTES = 1 << 24


def show_at_exit() -> None:
    """Print them at the end of this process if it is the command itself."""
    pid, _, path = os.environ.get(VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        atexit.register(show, path, os.getpid(), time.time())


def show(path: str, pid: int, since: float) -> None:
    """Print the problems of a result, if it is new and this process is the one with this id.

    Args:
        path: of the file that `paceline_cli.watched` writes.
        pid: of the command.
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
