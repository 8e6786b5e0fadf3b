"""ETTR: the share of the time in which a job makes steps that are not repeated.

A job is hit by faults at random times with a mean of 60 s between them. *Measured* is the time that
its new steps take when nothing fails, over the time that has passed. What a step takes when nothing
fails is the mean of those that begin `UNDISTURBED_SECONDS` after the first one of new processes,
and not just after a checkpoint on disk; of two launchers, the smaller mean counts for both, so that
what one of them costs in each step is lost time. A machine may be some percent faster or slower for
minutes: the job of torchrun also trains for `STRETCH_SECONDS` without faults, before the job of
Paceline and after it. *Optimum* is the formula of Kokolis et al.
("Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024),

    E[ETTR] = (1 - (u + t / 2) / M) / (1 + w / t),

with the measured mean time M between failures and the measured downtime u of a failure, for
checkpoints that cost nothing (w = 0) after each step (t): no interval can do better.

With copies in memory a job needs few checkpoints on disk, and has Paceline's default interval.
Under torchrun it saves at the interval that costs least at this rate of faults, after Young and
Daly.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

from paceline_evaluation.repair.cluster import wait_until
from paceline_evaluation.repair.trainings import WORLD, LoggedStep, StepLog

MTTF_SECONDS = 60.0
UNDISTURBED_SECONDS = 10.0
STRETCH_SECONDS = 90.0
AFTER_CHECKPOINT_STEPS = 5  # whose time is not that of an undisturbed step
# sqrt(2 w M) - w is 3.5 s, or 45 steps of 80 ms: w, what a checkpoint costs, is 0.11 s.
TORCHRUN_CHECKPOINT_STEPS = 45
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
_RECOVERY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Ettr:
    """The measured ETTR of one job."""

    launcher: str
    trainer: str
    faults: int
    seconds: float
    new_steps: int
    step_seconds: float  # the time of an undisturbed step that counts
    own_step_seconds: float  # under this launcher
    downtime_seconds: float  # mean, from a fault to the first step of new processes
    repeated_steps: int
    measured: float
    optimum: float
    # whether the job trained again after the last fault; if not, its downtime ends with the wait
    recovered: bool = True

    @property
    def ratio(self) -> float:
        return self.measured / self.optimum if self.optimum else 0.0  # it was never up


def measure(
    launcher: str,
    trainer: str,
    log: StepLog,
    faults: int,
    seed: int,
    checkpoint_steps: int = 0,
    earlier: Sequence[LoggedStep] = (),
) -> Ettr | None:
    """Kill ranks of a steady job at random times, until it does not recover from one.

    Return None if the job had no undisturbed step.

    Args:
        earlier: steps of the same training under the same launcher, without faults.
    """
    chance = random.Random(f"{seed} ettr")
    begun, first = time.monotonic(), log.newest()
    due, downtimes, recovered = begun, list[float](), True
    for _ in range(faults):
        due += chance.expovariate(1.0 / MTTF_SECONDS)
        rank, number = chance.randrange(WORLD), chance.choice(_SIGNALS)
        time.sleep(max(0.0, due - time.monotonic()))
        before = log.pids()
        injected = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(before[rank], number)

        def trains_again(before: dict[int, int] = before) -> bool:
            now = log.pids()
            return all(now[rank] != pid for rank, pid in before.items())

        recovered = wait_until(trains_again, _RECOVERY_SECONDS, 0.05)
        if not recovered:
            downtimes.append(time.monotonic() - injected)
            break
        again = log.first_common(log.pids())
        assert again is not None, "all ranks have finished a step"
        downtimes.append(again.at_seconds - injected)
    seconds = time.monotonic() - begun
    step_seconds = undisturbed_step_seconds([*earlier, *log.read()[0]], checkpoint_steps)
    if step_seconds is None:
        return None
    new_steps = log.newest() - first
    done = sum(step.at_seconds >= begun for step in log.read()[0])
    found = result(launcher, trainer, seconds, new_steps, done - new_steps, step_seconds, downtimes)
    return replace(found, recovered=recovered)


def train_undisturbed(log: StepLog) -> list[LoggedStep]:
    """Let a steady job train for a stretch. Return the steps of rank 0."""
    time.sleep(UNDISTURBED_SECONDS + STRETCH_SECONDS)
    return list(log.read()[0])


def undisturbed_step_seconds(
    steps: Sequence[LoggedStep], checkpoint_steps: int = 0
) -> float | None:
    """Return the mean time of a step when nothing fails; None if there was no such time.

    Args:
        steps: of one rank, over all its processes.
        checkpoint_steps: between two checkpoints on disk; 0: none.
    """
    begins: dict[int, float] = {}
    times = []
    for before, after in pairwise(steps):
        begin = begins.setdefault(before.pid, before.at_seconds)
        is_same = after.pid == before.pid
        since = after.completed % checkpoint_steps if checkpoint_steps else 0
        is_usual = since == 0 or since > AFTER_CHECKPOINT_STEPS
        if is_same and is_usual and before.at_seconds >= begin + UNDISTURBED_SECONDS:
            times.append(after.at_seconds - before.at_seconds)
    return mean(times) if times else None


def result(
    launcher: str,
    trainer: str,
    seconds: float,
    new_steps: int,
    repeated_steps: int,
    step_seconds: float,
    downtimes: list[float],
) -> Ettr:
    """Return the figures of a job that was observed for `seconds`, with a downtime per fault."""
    down = mean(downtimes)
    return Ettr(
        launcher,
        trainer,
        len(downtimes),
        seconds,
        new_steps,
        step_seconds,
        step_seconds,
        down,
        repeated_steps,
        new_steps * step_seconds / seconds,
        optimum(down, step_seconds, seconds / len(downtimes)),
    )


def with_one_step_time(results: Sequence[Ettr]) -> list[Ettr]:
    """Return the figures of the same training, for the fastest undisturbed steps of all."""
    fastest = min((one.step_seconds for one in results), default=0.0)
    return [
        replace(
            one,
            step_seconds=fastest,
            measured=one.new_steps * fastest / one.seconds,
            optimum=optimum(one.downtime_seconds, fastest, one.seconds / one.faults),
        )
        for one in results
    ]


def optimum(downtime: float, step: float, mttf: float) -> float:
    """Return the highest ETTR of the formula. Args are seconds."""
    return max(0.0, 1.0 - (downtime + step / 2.0) / mttf)
