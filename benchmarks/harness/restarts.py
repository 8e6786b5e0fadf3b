"""Kills of ranks, one after the other, and the time until all ranks train again.

A training writes the last finished step of each rank to a file of its directory (`TRAINING`), so
that every launcher is measured by the same means.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import NamedTuple

RANKS = 8
VICTIMS = (1, 2, 4, 6, 7)  # Paceline no longer uses a node that is to blame for three
STEPS_BETWEEN = 40  # each 50 ms or more
START_SECONDS = 60.0
RECOVERY_SECONDS = 30.0
JOB_SECONDS = 120.0  # for all kills of one job

# The first lines of each training. A rank reports a number that grows with each restart.
TRAINING = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

directory = Path(sys.argv[1])
torch.set_num_threads(1)

def replace(name, text):
    new = directory / f"new-{name}-{os.getpid()}"
    new.write_text(text)
    os.replace(new, directory / name)

def first_step():
    return int((directory / "step").read_text()) if (directory / "step").exists() else 0

def finished(rank, restart, step):
    replace(f"rank-{rank}", f"{restart} {os.getpid()} {step}")
    if rank == 0:
        replace("step", str(step))
"""

Start = Callable[[Path], AbstractContextManager[None]]


class NotTrainingError(RuntimeError):
    """The ranks did not all train within the time limit."""


class FinishedStep(NamedTuple):
    """The last finished step of a rank."""

    restart: int  # number of the restart, or generation
    pid: int
    step: int


def recovery_seconds(start: Start, script: str) -> float:
    """Return the median time from a kill to a step of all ranks, of a few kills in one job.

    Args:
        start: starts `train.py` of a directory, and ends it on exit.
        script: what follows `TRAINING` in `train.py`.

    Raises:
        NotTrainingError: the job did not start, or did not recover from a kill.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(TRAINING + script)
        with start(directory):
            end = time.monotonic() + JOB_SECONDS
            _wait(directory, lambda _: True, START_SECONDS, "start")
            seconds = []
            for victim in VICTIMS:
                if time.monotonic() > end:
                    raise NotTrainingError(
                        f"recovered from {len(seconds)} of {len(VICTIMS)} kills"
                        f" within {JOB_SECONDS:.0f} s"
                    )
                seconds.append(_kill(directory, victim))
            return median(seconds)


def _kill(directory: Path, victim: int) -> float:
    """Let the job train for a while, kill a rank, and wait for a step of all ranks after that."""
    before = _finished_steps(directory)
    aim = max(rank.step for rank in before.values()) + STEPS_BETWEEN
    before = _wait(
        directory,
        lambda ranks: min(rank.step for rank in ranks.values()) >= aim,
        START_SECONDS,
        f"make {STEPS_BETWEEN} steps",
    )
    newest = max(rank.restart for rank in before.values())
    killed = time.monotonic()
    os.kill(before[victim].pid, signal.SIGKILL)
    _wait(
        directory,
        lambda ranks: all(rank.restart > newest for rank in ranks.values()),
        RECOVERY_SECONDS,
        "recover",
    )
    return time.monotonic() - killed


def _wait(
    directory: Path, are: Callable[[dict[int, FinishedStep]], bool], seconds: float, what: str
) -> dict[int, FinishedStep]:
    """Return what each rank has reported last, once all have and satisfy the condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ranks = _finished_steps(directory)
        if len(ranks) == RANKS and are(ranks):
            return ranks
        time.sleep(0.01)
    raise NotTrainingError(f"did not {what} within {seconds:.0f} s")


def _finished_steps(directory: Path) -> dict[int, FinishedStep]:
    return {
        int(file.name.removeprefix("rank-")): FinishedStep(*map(int, file.read_text().split()))
        for file in directory.glob("rank-*")
    }
