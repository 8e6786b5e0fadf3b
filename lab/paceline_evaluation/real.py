"""The real arm: the reference trainer with emulated kernels, real agents and a real server.

Four ranks on two nodes of this machine. Faults are injected into one job, trial after trial, in
mode `observe`, so that nothing is restarted. After a fault that ends the job, a new one is started.
The findings of a trial are the incidents that the server opened.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from functools import cached_property

import click

from paceline_cli.client import Client
from paceline_demo.cluster import GPUS_PER_NODE, Cluster
from paceline_demo.training import start_training
from paceline_evaluation import inject
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.observed_job import SERVER_SECONDS, ObservedJob
from paceline_evaluation.record import TrialRecord
from paceline_evaluation.scoring import TrialVerdict, judge

AXES = (2, 2, 1)  # dp, pp, tp: every rank has a peer in its stage, and there is a pipeline
_ARGUMENTS = ("--emulate-kernel-ms", "12,24", "--global-batch-size", "16", "--evaluate-every", "0")
_UNEVEN = {
    "stage_imbalance": ("--layers", "6", "--stage-layers", "2,4"),
    "sequence_variance": ("--layers", "2", "--sequence-spread", "3"),
}
_START_SECONDS = 120.0
_WARM_UP_STEPS = 20  # before the first trial of a job: detectors compare with earlier steps
_HEALTHY_STEPS = (15, 40)
_NONE_STEPS = 120
_FAULTY_STEPS = 40  # a fault not detected by then counts as a miss
_RECOVERY_STEPS = 40  # for incidents to be resolved after the fault is removed
_FATAL_SECONDS = 30.0


class RealArm:
    """Runs trials of `kinds` one after another."""

    def __init__(self, kinds: tuple[str, ...], trials: int, seed: int) -> None:
        self.kinds, self.trials, self.seed = kinds, trials, seed
        self._jobs = 0

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster of this arm; its directories exist from its first use on."""
        return Cluster(node_count=AXES[0] * AXES[1] * AXES[2] // GPUS_PER_NODE, port=0)

    def run(
        self, report: Callable[[TrialVerdict], None], done: Collection[tuple[str, str, int]] = ()
    ) -> list[TrialVerdict]:
        """Run all trials but those whose arm, kind and number are in `done`; report each verdict.

        Raises click.ClickException if the cluster or a job does not start.
        """
        trials = [
            (kind, number)
            for kind in self.kinds
            for number in range(self.trials)
            if ("real", kind, number) not in done
        ]
        if not trials:
            return []
        verdicts = []
        with self._running() as client:
            job: ObservedJob | None = None
            for kind, number in trials:
                job, record = self._trial(client, job, kind, number)
                verdicts.append(judge(record))
                report(verdicts[-1])
        return verdicts

    @contextlib.contextmanager
    def _running(self) -> Iterator[Client]:
        try:
            self.cluster.start()
            with Client(self.cluster.url, timeout_seconds=SERVER_SECONDS) as client:
                yield client
        finally:
            self.cluster.close()
            self.cluster.remove_logs()

    def _trial(
        self, client: Client, job: ObservedJob | None, kind: str, number: int
    ) -> tuple[ObservedJob | None, TrialRecord]:
        """Run one trial. Return the job for the next trial, or None if that needs a new job."""
        if kind in _UNEVEN:
            self._stop(job)
            job = self._start(client, _UNEVEN[kind], warm=False)
            record = self._chronic(job, kind)
            self._stop(job)
            job = None
        else:
            if job is None:
                job = self._start(client, (), warm=True)
            record = self._sudden(job, kind, random.Random(f"{self.seed} {kind} {number}"))
            if job.is_over or kind in inject.FATAL:
                self._stop(job)
                job = None
        record.arm, record.number = "real", number
        record.job = f"{self.cluster.url} {'x'.join(map(str, AXES))}"
        return job, record

    def _start(self, client: Client, arguments: tuple[str, ...], *, warm: bool) -> ObservedJob:
        self._jobs += 1
        job_id = start_training(
            self.cluster, AXES, "observe", *_ARGUMENTS, *arguments, checkpoints_name=f"{self._jobs}"
        )
        job = ObservedJob(client, job_id)
        steps = _WARM_UP_STEPS if warm else 0
        if (
            not job.wait_until(lambda: job.step >= steps or job.is_over, _START_SECONDS)
            or job.is_over
        ):
            raise click.ClickException(f"job {job_id} did not start: {job.view.get('verdict')}")
        return job

    def _stop(self, job: ObservedJob | None) -> None:
        if job is None:
            return
        with contextlib.suppress(click.ClickException):  # the job may have ended already
            job.client.post(f"/jobs/{job.job_id}/stop")
        job.wait_until(lambda: job.is_over, _FATAL_SECONDS)

    def _chronic(self, job: ObservedJob, kind: str) -> TrialRecord:
        """Record a trial whose fault is present from the first step."""
        stage = 1 if kind == "stage_imbalance" else None
        job.wait_for_steps(_WARM_UP_STEPS + _FAULTY_STEPS)
        fault = TrialFault(kind, 0, inject.UNEVEN_MAGNITUDE, stage=stage)
        return job.record(kind, (fault,), set(), 0)

    def _sudden(self, job: ObservedJob, kind: str, chance: random.Random) -> TrialRecord:
        """Run healthy steps, inject the fault, record the findings, remove the fault."""
        job.poll()
        earlier, first = set(job.incidents), job.step
        if kind == "none":
            job.wait_for_steps(_NONE_STEPS)
            return job.record(kind, (), earlier, first)
        if not job.wait_for_steps(chance.randint(*_HEALTHY_STEPS)):
            raise click.ClickException(
                f"the job ended before the fault was injected: {job.view.get('verdict')}"
            )
        started = datetime.now().astimezone()
        faults, remove_faults = inject.inject(kind, self.cluster, job.ranks(), job.step + 1, chance)
        try:
            if kind in inject.FATAL:
                job.wait_until(lambda: self._is_fatal_detected(job, earlier), _FATAL_SECONDS)
            else:
                job.wait_for_steps(_FAULTY_STEPS)
            faults = job.with_onset(faults, started)
            record = job.record(kind, faults, earlier, first)
            record.onset_seconds = (started.timestamp(),) * len(faults)
        finally:
            remove_faults()
        if kind not in inject.FATAL:
            self._wait_until_resolved(job)
        return record

    def _is_fatal_detected(self, job: ObservedJob, earlier: set[str]) -> bool:
        return any(
            incident["kind"] in ("hang", "failure")
            for key, incident in job.incidents.items()
            if key not in earlier
        )

    def _wait_until_resolved(self, job: ObservedJob) -> None:
        """Wait until the fault's incidents are resolved, at most _RECOVERY_STEPS."""
        job.poll()
        goal = job.step + _RECOVERY_STEPS
        job.wait_until(
            lambda: (
                job.step >= goal
                or job.is_over
                or all(incident["state"] == "resolved" for incident in job.incidents.values())
            ),
            5.0 * _RECOVERY_STEPS,
        )
