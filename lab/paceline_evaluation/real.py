"""The real arm: the reference trainer on emulated kernels, under real agents and a real server.

Four ranks on two nodes of this machine. Faults are put into one job after another trial, in mode
`observe`, so that what is found stays and nothing is restarted; a fault that ends the job is
followed by a new one. What a trial found are the incidents that the server opened.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import click

from paceline_cli.client import Client
from paceline_demo.cluster import GPUS_PER_NODE, Cluster
from paceline_demo.training import start_training
from paceline_evaluation import inject
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.record import Seen, TrialRecord
from paceline_evaluation.scoring import TrialVerdict, judge
from paceline_server.detect.finding import Finding

AXES = (2, 2, 1)  # dp, pp, tp: every rank has a peer in its stage, and there is a pipeline
_ARGUMENTS = ("--emulate-kernel-ms", "12,24", "--global-batch-size", "16", "--evaluate-every", "0")
_UNEVEN = {
    "stage_imbalance": ("--layers", "6", "--stage-layers", "2,4"),
    "sequence_variance": ("--layers", "2", "--sequence-spread", "3"),
}
_START_SECONDS = 120.0
_POLL_SECONDS = 0.2
_WARM_STEPS = 20  # of a job, before the first trial: detectors need a past
_HEALTHY_STEPS = (15, 40)
_NONE_STEPS = 120
_FAULTY_STEPS = 40  # a fault that is not found by then is not found
_SETTLE_STEPS = 40  # for what was found to be over, once the fault is lifted
_FATAL_SECONDS = 30.0


@dataclass
class _Job:
    """One running job, as the server tells it."""

    client: Client
    job_id: str
    view: dict[str, Any] = field(default_factory=dict)
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)

    def poll(self) -> None:
        self.view = self.client.get(f"/jobs/{self.job_id}")
        for incident in self.client.items("/incidents", job=self.job_id):
            self.incidents[incident["id"]] = incident

    @property
    def step(self) -> int:
        """The newest that is finished; -1 before the first."""
        newest: int | None = self.view.get("step")
        return -1 if newest is None else newest

    @property
    def is_over(self) -> bool:
        return self.view.get("state") in ("failed", "finished", "stopped")

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true within that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if condition():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def steps_pass(self, steps: int) -> bool:
        """Whether the job made so many more."""
        self.poll()
        goal = self.step + steps
        return self.until(lambda: self.step >= goal or self.is_over, 5.0 * steps) and (
            not self.is_over
        )

    def place(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")


class RealArm:
    """Runs trials of `kinds` one after another; use as a context manager."""

    def __init__(self, kinds: tuple[str, ...], trials: int, seed: int) -> None:
        self.kinds, self.trials = kinds, trials
        self.chance = random.Random(seed)
        self.cluster = Cluster(node_count=AXES[0] * AXES[1] * AXES[2] // GPUS_PER_NODE, port=0)
        self._jobs = 0

    def run(self, tell: Callable[[TrialVerdict], None]) -> list[TrialVerdict]:
        """Raises click.ClickException when the cluster or a job cannot be started."""
        verdicts = []
        with self._running() as client:
            job: _Job | None = None
            for kind in self.kinds:
                for number in range(self.trials):
                    job, record = self._trial(client, job, kind, number)
                    verdicts.append(judge(record))
                    tell(verdicts[-1])
        return verdicts

    @contextlib.contextmanager
    def _running(self) -> Iterator[Client]:
        try:
            self.cluster.start()
            with Client(self.cluster.url) as client:
                yield client
        finally:
            self.cluster.close()
            self.cluster.remove_logs()

    def _trial(
        self, client: Client, job: _Job | None, kind: str, number: int
    ) -> tuple[_Job | None, TrialRecord]:
        """Plays it; returns the job for the next one, or None if that needs another."""
        if kind in _UNEVEN:
            self._stop(job)
            job = self._start(client, _UNEVEN[kind], warm=False)
            record = self._chronic(job, kind)
            self._stop(job)
            job = None
        else:
            if job is None:
                job = self._start(client, (), warm=True)
            record = self._sudden(job, kind)
            if job.is_over or kind in inject.FATAL:
                self._stop(job)
                job = None
        record.arm, record.number = "real", number
        record.job = f"{self.cluster.url} {'x'.join(map(str, AXES))}"
        return job, record

    def _start(self, client: Client, arguments: tuple[str, ...], *, warm: bool) -> _Job:
        self._jobs += 1
        job_id = start_training(
            self.cluster, AXES, "observe", *_ARGUMENTS, *arguments, checkpoints_name=f"{self._jobs}"
        )
        job = _Job(client, job_id)
        steps = _WARM_STEPS if warm else 0
        if not job.until(lambda: job.step >= steps or job.is_over, _START_SECONDS) or job.is_over:
            raise click.ClickException(f"job {job_id} did not start: {job.view.get('verdict')}")
        return job

    def _stop(self, job: _Job | None) -> None:
        if job is None:
            return
        with contextlib.suppress(click.ClickException):  # it may have ended by itself
            job.client.post(f"/jobs/{job.job_id}/stop")
        job.until(lambda: job.is_over, _FATAL_SECONDS)

    def _chronic(self, job: _Job, kind: str) -> TrialRecord:
        """The trouble is there from the first step."""
        stage = 1 if kind == "stage_imbalance" else None
        job.steps_pass(_WARM_STEPS + _FAULTY_STEPS)
        fault = TrialFault(kind, 0, inject.UNEVEN_MAGNITUDE, stage=stage)
        return self._record(job, kind, (fault,), set(), 0)

    def _sudden(self, job: _Job, kind: str) -> TrialRecord:
        """A healthy stretch, then the fault, then its end."""
        job.poll()
        known, first = set(job.incidents), job.step
        if kind == "none":
            job.steps_pass(_NONE_STEPS)
            return self._record(job, kind, (), known, first)
        if not job.steps_pass(self.chance.randint(*_HEALTHY_STEPS)):
            raise click.ClickException(f"the job ended by itself: {job.view.get('verdict')}")
        started = datetime.now().astimezone()
        faults, lift = inject.inject(kind, self.cluster, job.place(), job.step + 1, self.chance)
        try:
            if kind in inject.FATAL:
                job.until(lambda: self._fatal_found(job, known), _FATAL_SECONDS)
            else:
                job.steps_pass(_FAULTY_STEPS)
            faults = _begun(job, faults, started)
            record = self._record(job, kind, faults, known, first)
            record.onset_seconds = (started.timestamp(),) * len(faults)
        finally:
            lift()
        if kind not in inject.FATAL:
            self._settle(job)
        return record

    def _fatal_found(self, job: _Job, known: set[str]) -> bool:
        return any(
            one["kind"] in ("hang", "failure")
            for key, one in job.incidents.items()
            if key not in known
        )

    def _settle(self, job: _Job) -> None:
        """Wait until the fault's incidents are over, or as long as is sensible."""
        job.poll()
        goal = job.step + _SETTLE_STEPS
        job.until(
            lambda: (
                job.step >= goal
                or job.is_over
                or all(one["state"] == "resolved" for one in job.incidents.values())
            ),
            5.0 * _SETTLE_STEPS,
        )

    def _record(
        self, job: _Job, kind: str, faults: tuple[TrialFault, ...], known: set[str], first: int
    ) -> TrialRecord:
        """Steps count from the start of the trial."""
        found = [one for key, one in job.incidents.items() if key not in known]
        record = TrialRecord(
            kind=kind,
            faults=tuple(
                replace(fault, onset_step=max(0, fault.onset_step - first)) for fault in faults
            ),
            steps=job.step - first,
        )
        for incident in sorted(found, key=lambda one: str(one["detected_at"])):
            step = incident["detected_step"]
            record.seen.append(
                Seen(
                    finding=_finding(incident),
                    step=(job.step if step is None else step) - first,
                    seconds=datetime.fromisoformat(incident["detected_at"]).timestamp(),
                )
            )
        return record


def _begun(job: _Job, faults: tuple[TrialFault, ...], at: datetime) -> tuple[TrialFault, ...]:
    """From the first step that began after `at`: what the server knew then was a second old."""
    steps = job.client.items(f"/jobs/{job.job_id}/steps")
    later = [one["step"] for one in steps if datetime.fromisoformat(one["started_at"]) >= at]
    onset = min(later, default=job.step + 1)
    return tuple(replace(fault, onset_step=onset) for fault in faults)


def _finding(incident: dict[str, Any]) -> Finding:
    """What opened the incident; its fields have the finding's names."""
    link = incident.get("link")
    return Finding(
        fingerprint=incident["id"],
        detected_ns=0,
        **{name: incident[name] for name in ("kind", "cause", "summary", "generation", "severity")},
        **{name: incident[name] for name in ("rank", "node", "stage", "onset_step")},
        ranks=incident.get("ranks") or [],
        link=None if link is None else (link[0], link[1]),
        side=incident.get("side"),
    )
