"""Healthy jobs in noise: not one restart.

Simulated jobs are those of the synthetic arm without a fault, with spare nodes. The engine's
findings go to `decide` in mode `auto`, which keeps its incidents and actions from tick to tick.
Real jobs train beside processes that use CPUs and disk, and beside the simulation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count

import numpy as np

from paceline_evaluation.campaign import process_pool
from paceline_evaluation.emission import GENERATION, JOB, START_NS
from paceline_evaluation.foreign.disturbance import disturb
from paceline_evaluation.plans import draw_plan
from paceline_evaluation.repair.cluster import wait_until
from paceline_evaluation.repair.trial import RunningJob, unless_away
from paceline_evaluation.synthetic_job import SyntheticJob
from paceline_server.decide.decide import decide
from paceline_server.decide.types import (
    ActionView,
    Experience,
    IncidentView,
    JobSpec,
    JobView,
    NodeView,
    RankView,
)
from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy

MINUTE_SECONDS = 60.0  # a real job, for each trial
SIMULATED_SECONDS = 720.0  # for each trial: with 120 of them, 2 real and 24 simulated hours
_STEPS = (300, 500)  # number that a simulated job has
_LARGEST = 64  # ranks of a simulated job
_SPARES = 2
_STRETCH_STEPS = 16


@dataclass
class Healthy:
    """The time of healthy jobs, and the actions and incidents in it."""

    real_trials: int = 0
    real_seconds: float = 0.0
    real_restarts: int = 0
    real_incidents: int = 0  # above severity `info`
    simulated_trials: int = 0
    simulated_seconds: float = 0.0
    simulated_steps: int = 0
    simulated_jobs: int = 0
    simulated_restarts: int = 0
    simulated_incidents: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, other: Healthy) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class SimulatedJob(SyntheticJob):
    """A synthetic job without a fault, whose findings are acted on."""

    def __init__(
        self, seed: tuple[int, ...], largest: int = _LARGEST, steps: tuple[int, int] = _STEPS
    ) -> None:
        chance = np.random.default_rng(seed)
        number = int(chance.integers(*steps))
        super().__init__("none", draw_plan("none", chance, number, largest), number, chance)
        self.incidents: dict[str, IncidentView] = {}
        self.warnings: dict[str, Finding] = {}  # by incident: its first finding above `info`
        self.actions: dict[str, ActionView] = {}
        self._ids = count(1)

    def run(self) -> None:
        for first in range(0, self.record.steps, _STRETCH_STEPS):
            self.play_steps(first, min(_STRETCH_STEPS, self.record.steps - first))

    def tick(self, at_seconds: float) -> list[Finding]:
        findings = super().tick(at_seconds)
        now_ns = START_NS + int(at_seconds * 1e9)
        decision = decide(
            self._view(now_ns),
            findings,
            Policy(mode="auto"),
            now_ns,
            next_command_id=lambda: next(self._ids),
            new_id=lambda prefix: f"{prefix}-{next(self._ids):08}",
        )
        self.incidents |= {one.incident_id: one for one in decision.incidents}
        for one in decision.incidents:
            if one.finding.severity != "info":
                self.warnings.setdefault(one.incident_id, one.finding)
        self.actions |= {one.action_id: one for one in decision.actions}
        return findings

    def restarts(self) -> list[ActionView]:
        """Return the restarts that were begun; proposals to a person are not among them."""
        return [
            action for action in self.actions.values() if action.kind == "restart" and action.phases
        ]

    def _view(self, now_ns: int) -> JobView:
        shape = self.shape
        used = shape.node_count
        return JobView(
            job_id=JOB,
            spec=JobSpec(name="healthy", argv=["train"], topology=shape.topology),
            state="running",
            generation=GENERATION,
            topology=shape.topology,
            ranks=[
                RankView(
                    rank=rank,
                    agent_id=shape.node(rank),
                    local_rank=rank % shape.ranks_per_node,
                    gpu=rank % shape.ranks_per_node,
                    state="attached",
                    step=max(self.step, 0),
                )
                for rank in range(shape.world_size)
            ],
            nodes=[
                NodeView(
                    agent_id=f"node-{number}",
                    address=f"10.0.0.{number}",
                    rendezvous_port=29500,
                    slots=shape.ranks_per_node,
                    gpus=list(range(shape.ranks_per_node)),
                    last_seen_ns=now_ns,
                    boot_id="boot",
                    job=JOB if number < used else None,
                )
                for number in range(used + _SPARES)
            ],
            incidents=[one for one in self.incidents.values() if one.state != "resolved"],
            actions=[one for one in self.actions.values() if one.finished_ns is None],
            highest_step=max(self.step, 0),
            checkpoint_step=max(self.step, 0),
            first_step=0,
            experience=Experience(),
            can_checkpoint=True,
            step_seconds=self.seconds / max(self.step, 1) or None,
        )


def simulate(seed: int, number: int) -> Healthy:
    """Return the outcome of SIMULATED_SECONDS of healthy simulated jobs."""
    healthy = Healthy(simulated_trials=1)
    while healthy.simulated_seconds < SIMULATED_SECONDS:
        job = SimulatedJob((seed, number, healthy.simulated_jobs))
        job.run()
        healthy.simulated_jobs += 1
        healthy.simulated_seconds += job.seconds
        healthy.simulated_steps += job.record.steps
        healthy.simulated_restarts += len(job.restarts())
        healthy.simulated_incidents += len(job.warnings)
        healthy.texts += [
            *(f"simulated {job.shape.text}: {action.reason}" for action in job.restarts()),
            *(f"simulated {job.shape.text}: {one.summary}" for one in job.warnings.values()),
        ]
    return healthy


@contextmanager
def simulating(healthy: Healthy, seed: int, trials: int) -> Iterator[Callable[[], None]]:
    """Run the trials of `simulate` that are left, up to this number, in a process of its own.

    The results are added at the end, those of an interrupted one, too. Yields a function that waits
    for all of them.
    """
    with process_pool(1) as pool:
        left = range(healthy.simulated_trials, trials)
        running = [pool.submit(simulate, seed, number) for number in left]

        def wait() -> None:
            for trial in running:
                trial.result()

        try:
            yield wait
        finally:
            pool.shutdown(cancel_futures=True)
            for trial in running:
                if not trial.cancelled() and trial.exception() is None:
                    healthy.add(trial.result())


def train(healthy: Healthy, running: RunningJob, seed: int, number: int) -> None:
    """Add a minute of a real job in noise, and its restarts and incidents since the last minute."""
    running.make_steady()
    chance = random.Random(f"{seed} none {number}")
    hogs, is_disk_busy = chance.choice((0, 0, 1, 2)), chance.random() < 0.3
    generation, known = running.watched or (running.job()["generation"], set(running.incidents()))
    warnings: dict[str, str] = {}  # by incident; its severity may become `info` later

    def watch() -> bool:
        for key, incident in running.incidents().items():
            if key not in known and incident["severity"] != "info":
                warnings.setdefault(key, incident["summary"])
        return False

    environment = running.cluster.environment()
    with disturb(
        hogs,
        is_disk_busy=is_disk_busy,
        directory=running.cluster.memory,
        environment=environment,
    ):
        wait_until(unless_away(watch), MINUTE_SECONDS, 1.0)
    healthy.real_trials += 1
    healthy.real_seconds += MINUTE_SECONDS
    watch()
    running.watched = running.job()["generation"], set(running.incidents())
    healthy.real_restarts += running.watched[0] - generation
    healthy.real_incidents += len(warnings)
    healthy.texts += warnings.values()
