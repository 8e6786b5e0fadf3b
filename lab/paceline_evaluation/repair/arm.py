"""Runs the trials of the repair arm, one after another, and the same faults under torchrun."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import click

from paceline_cli.client import Client
from paceline_demo.training import stop_jobs
from paceline_evaluation.repair import ettr, faults, noise, torchrun
from paceline_evaluation.repair.cluster import Database, RepairCluster, why_missing
from paceline_evaluation.repair.schedule import PlannedTrial, draw, groups
from paceline_evaluation.repair.trainings import (
    LoggedStep,
    StepLog,
    Training,
    available_trainings,
)
from paceline_evaluation.repair.trial import (
    NOT_PLAYED,
    FinalState,
    RunningJob,
    TrialResult,
    is_good,
    play,
)

KINDS = ("none", *faults.KINDS, "mttf_60")
_FAULTS_PER_JOB = 30

Report = Callable[[int, str], None]  # number of trials done, and what to print about a bad one


@dataclass
class RepairResults:
    """The outcomes of the finished trials, and the other measurements."""

    trials: list[TrialResult] = field(default_factory=list)
    baseline: list[TrialResult] = field(default_factory=list)
    final_states: list[FinalState] = field(default_factory=list)
    healthy: noise.Healthy | None = None
    ettr: list[ettr.Ettr] = field(default_factory=list)


class RepairArm:
    """Runs `trials` faults of each of `kinds`; `skipped` says what cannot run here, and why."""

    def __init__(
        self,
        kinds: Sequence[str],
        trials: int,
        seed: int,
        trainings: Sequence[str] | None = None,
    ) -> None:
        available, skipped = available_trainings()
        self.trainings = [one for one in available if trainings is None or one.name in trainings]
        reasons = {plan.name: faults.why_not(plan) for plan in faults.PLANS if plan.kind in kinds}
        self.skipped = [*skipped, *(f"{name}: {why}" for name, why in reasons.items() if why)]
        self.kinds, self.count, self.seed = kinds, trials, seed
        self._usual: Database = "sqlite" if why_missing("postgresql") else "postgresql"
        self.trials = draw(
            [kind for kind in kinds if kind in faults.KINDS],
            trials,
            seed,
            self.trainings,
            [plan for plan in faults.PLANS if plan.kind in kinds and not reasons[plan.name]],
            self._usual,
        )
        self._jobs = 0

    @property
    def total(self) -> int:
        """Number of trials, those of the baseline included."""
        others = sum(kind in self.kinds for kind in ("none", "mttf_60", "mttf_60")) * self.count
        return len(self.trials) + len(self._baseline()) + others

    def _baseline(self) -> list[PlannedTrial]:
        return [trial for trial in self.trials if trial.plan.name in torchrun.FAULTS]

    def run(self, report: Report, results: RepairResults) -> None:
        """Run all trials and add to the results, which count also if this is interrupted.

        Trials that are among the results are not repeated. The first fault that cannot be played
        ends its job, not the arm.
        """
        left = _left(self.trials, results.trials, report)
        for database, trials in groupby(left, key=lambda trial: trial.database):
            cluster = RepairCluster(database)
            with cluster.running():
                self._play_all(cluster, list(trials), results, report)
        if same := _left(self._baseline(), results.baseline, report):
            torchrun.play_all(same, report, results.baseline)
        if "none" in self.kinds:
            results.healthy = results.healthy or noise.Healthy()
            report(results.healthy.real_trials, "")
            self._watch_healthy(results.healthy, report)
        if "mttf_60" in self.kinds:
            self._measure_ettr(report, results.ettr)

    def _watch_healthy(self, healthy: noise.Healthy, report: Report) -> None:
        """Watch healthy jobs, the trainings in turn: one minute for each trial."""
        cluster = RepairCluster(self._usual)
        share = -(-self.count // len(self.trainings))
        first = healthy.real_trials
        with noise.simulating(healthy, self.seed, self.count) as wait:
            with cluster.running(), Client(cluster.url, cluster.operator_token) as client:
                for number in range(first, self.count):
                    if number == first or number % share == 0:
                        stop_jobs(cluster.url, cluster.operator_token)
                        running = self._job(cluster, client, self.trainings[number // share])
                    noise.train(healthy, running, self.seed, number)
                    report(1, "")
                stop_jobs(cluster.url, cluster.operator_token)
            wait()
        report(0, "\n".join(healthy.texts))

    def _measure_ettr(self, report: Report, results: list[ettr.Ettr]) -> None:
        training = self.trainings[0]
        with_disk = replace(training, checkpoint_steps=ettr.TORCHRUN_CHECKPOINT_STEPS)
        with_memory = replace(training, checkpoint_steps=0)

        def measure(
            launcher: str, log: StepLog, training: Training, earlier: Sequence[LoggedStep] = ()
        ) -> None:
            found = ettr.measure(
                launcher,
                training.name,
                log,
                self.count,
                self.seed,
                training.checkpoint_steps,
                earlier,
            )
            if found is None:
                report(0, f"{launcher}: no undisturbed step, as with few kills that come early")
                return
            results.append(found)
            if not found.recovered:
                report(0, f"{launcher} did not recover from one of the kills")

        done = {one.launcher for one in results}
        report(self.count * len(done), "")
        undisturbed: list[LoggedStep] = []
        if "torchrun" not in done:
            with torchrun.jobs() as make:
                job = make(with_disk)
                if job.make_steady():
                    undisturbed = ettr.train_undisturbed(job.log)
        if "Paceline" not in done:
            cluster = RepairCluster(self._usual)
            with cluster.running(), Client(cluster.url, cluster.operator_token) as client:
                cluster.yield_processors()
                running = self._job(cluster, client, with_memory)
                running.make_steady()
                measure("Paceline", running.log, with_memory)
                stop_jobs(cluster.url, cluster.operator_token)
            report(self.count, "")
        if "torchrun" not in done:
            with torchrun.jobs() as make:
                job = make(with_disk)
                if job.make_steady():
                    ettr.train_undisturbed(job.log)
                    measure("torchrun", job.log, with_disk, undisturbed)
            report(self.count, "")

    def _play_all(
        self,
        cluster: RepairCluster,
        trials: Sequence[PlannedTrial],
        results: RepairResults,
        report: Report,
    ) -> None:
        with Client(cluster.url, cluster.operator_token) as client:
            for group in groups(trials, _FAULTS_PER_JOB):
                running: RunningJob | None = None
                for trial in group:
                    running = running or self._job(cluster, client, trial.training)
                    result = _played(trial, running)
                    if not result.was_played:
                        stop_jobs(cluster.url, cluster.operator_token)
                        running = None
                    results.trials.append(result)
                    report(1, "" if is_good(result) else _text(result))
                if running is not None:
                    self._finish(running, group, results, report)
                stop_jobs(cluster.url, cluster.operator_token)

    def _job(self, cluster: RepairCluster, client: Client, training: Training) -> RunningJob:
        self._jobs += 1
        return RunningJob(cluster, client, training, self._jobs)

    def _finish(
        self,
        running: RunningJob,
        group: Sequence[PlannedTrial],
        results: RepairResults,
        report: Report,
    ) -> None:
        if group[-1].plan.outcome == "end":
            return  # it has ended
        state = running.finish()
        results.final_states.append(state)
        if state.different != []:
            report(0, f"{state.trainer}: the last state differs: {state}")


def _left(
    trials: Sequence[PlannedTrial], finished: Sequence[TrialResult], report: Report
) -> list[PlannedTrial]:
    """Return the trials that are not finished; report the others as done."""
    done = {(result.kind, result.number) for result in finished}
    left = [trial for trial in trials if (trial.plan.kind, trial.number) not in done]
    report(len(trials) - len(left), "")
    return left


def _played(trial: PlannedTrial, running: RunningJob) -> TrialResult:
    running.chance = random.Random(trial.seed)
    plan = trial.plan
    try:
        result = play(plan, running)
    except click.ClickException as error:
        result = TrialResult(
            plan.kind,
            plan.name,
            trial.training.name,
            required=plan.outcome,
            outcome=f"{NOT_PLAYED}: {error.message}",
        )
    result.number = trial.number
    return result


def _text(result: TrialResult) -> str:
    return f"{result.kind} ({result.trainer}): {result}"
