"""ETTR: the share of the time in which a job makes steps that are not repeated.

A job is hit by faults at random times with a mean of 60 s between them. *Measured* is the time that
its new steps take when nothing fails, over the time that has passed. *Optimum* is the formula of
Kokolis et al. ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024),

    E[ETTR] = (1 - (u + t / 2) / M) / (1 + w / t),

with the measured mean time M between failures and the measured downtime u of a failure, for
checkpoints that cost nothing (w = 0) after each step (t): no interval can do better.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from statistics import mean

from paceline_evaluation.repair.cluster import wait_until
from paceline_evaluation.repair.trainings import WORLD, StepLog

MTTF_SECONDS = 60.0
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
    step_seconds: float
    downtime_seconds: float  # mean, from a fault to the first new step
    measured: float
    optimum: float

    @property
    def ratio(self) -> float:
        return self.measured / self.optimum


def measure(launcher: str, trainer: str, log: StepLog, faults: int, seed: int) -> Ettr | None:
    """Kill ranks of a steady job at random times. Return None if it does not recover from one."""
    chance = random.Random(f"{seed} ettr")
    begun, first = time.monotonic(), log.newest()
    due, downtimes = begun, list[float]()
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

        if not wait_until(trains_again, _RECOVERY_SECONDS, 0.05):
            return None
        again = log.first_common(log.pids())
        assert again is not None, "all ranks have finished a step"
        downtimes.append(again.at_seconds - injected)
    seconds, step_seconds = time.monotonic() - begun, log.step_seconds()
    assert step_seconds is not None, "a steady job has finished steps"
    return result(launcher, trainer, seconds, log.newest() - first, step_seconds, downtimes)


def result(
    launcher: str,
    trainer: str,
    seconds: float,
    new_steps: int,
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
        down,
        new_steps * step_seconds / seconds,
        optimum(down, step_seconds, seconds / len(downtimes)),
    )


def optimum(downtime: float, step: float, mttf: float) -> float:
    """Return the highest ETTR of the formula. Args are seconds."""
    return max(0.0, 1.0 - (downtime + step / 2.0) / mttf)
