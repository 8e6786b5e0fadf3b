"""Runs the trials of the foreign arm, one after another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from paceline_cli.client import Client
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.foreign.cluster import ForeignCluster
from paceline_evaluation.foreign.disturbance import disturb
from paceline_evaluation.foreign.inject import Injector, why_no_control_groups
from paceline_evaluation.foreign.network_nodes import why_unavailable
from paceline_evaluation.foreign.plan import MOST_RANKS, Plan, available_trainers, draw_plans
from paceline_evaluation.observed_job import ObservedJob, finding_of
from paceline_evaluation.record import TrialRecord
from paceline_evaluation.scoring import TrialVerdict, judge, names_fault

_START_SECONDS = 180.0
_WARM_UP_STEPS = 30
_FATAL = frozenset({"hang", "crash"})
_FATAL_SECONDS = 30.0
_FAULTY_STEPS = 60  # a fault not detected by then counts as a miss
_FAULTY_SECONDS = 20.0  # or by then, if the steps are shorter
_NONE_SECONDS = 60.0
_CAUSE_SECONDS = 3.0  # from the first report to its newest version
_HEADLINE_SECONDS = 5.0  # the line of the script arrives after the first report
_NEEDS_NETWORK = frozenset({"rate_limit", "reset"})
_NEEDS_CONTROL_GROUPS = frozenset({"hog", "leak", "worker_leak"})
# A shared CPU or link costs what is measured, not what is asked for.
_MEASURED = frozenset({"hog", "rate_limit"})


class TrainingFailedError(Exception):
    """A training did not start or ended before its fault; the message says why."""


@dataclass(frozen=True, slots=True)
class _Healthy:
    """The steps of a job before its fault."""

    step_seconds: float
    sent_bytes_per_step: float | None
    cpu_waits: dict[int, float]  # by rank: seconds per step without a CPU


class ForeignArm:
    """Runs `trials` trials of each of `kinds`; `skipped` says what cannot run here, and why."""

    def __init__(
        self,
        kinds: tuple[str, ...],
        trials: int,
        seed: int,
        trainers: Sequence[str] | None = None,
        largest: int = MOST_RANKS,
        none_seconds: float = _NONE_SECONDS,
    ) -> None:
        available, skipped = available_trainers(largest)
        chosen = tuple(name for name in available if trainers is None or name in trainers)
        self.none_seconds = none_seconds
        self.skipped = list(skipped)
        plans = [plan for kind in kinds for plan in draw_plans(kind, trials, seed, chosen, largest)]
        self.plans = [plan for plan in plans if self._can_run(plan)]
        self._jobs = 0

    @cached_property
    def cluster(self) -> ForeignCluster:
        """The cluster of this arm; its directories exist from its first use on."""
        return ForeignCluster()

    def _can_run(self, plan: Plan) -> bool:
        reason = None
        if plan.fault in _NEEDS_NETWORK:
            reason = why_unavailable()
        elif plan.fault in _NEEDS_CONTROL_GROUPS:
            reason = why_no_control_groups()
        if reason is None:
            return True
        if (sentence := f"{plan.fault}: {reason}") not in self.skipped:
            self.skipped.append(sentence)
        return False

    def run(
        self, report: Callable[[TrialVerdict], None], done: Collection[tuple[str, str, int]] = ()
    ) -> list[TrialVerdict]:
        """Run all trials but those whose arm, kind and number are in `done`; report each verdict.

        Raises:
            click.ClickException: the cluster does not start.
        """
        trials = [
            (number, plan)
            for number, plan in enumerate(self.plans)
            if ("foreign", plan.kind, number) not in done
        ]
        if not trials:
            return []
        verdicts = []
        with self.cluster.running() as client:
            for number, plan in trials:
                try:
                    record = self._trial(client, plan)
                except TrainingFailedError as error:
                    self.skipped.append(f"{plan.trainer} with {plan.fault}: {error}")
                    continue
                record.number = number
                verdicts.append(judge(record))
                report(verdicts[-1])
        return verdicts

    def _trial(self, client: Client, plan: Plan) -> TrialRecord:
        self._jobs += 1
        job = ObservedJob(client, f"foreign-{self._jobs}-{plan.trainer}-{plan.fault}")
        surroundings = plan.surroundings
        with ExitStack() as cleanup:
            cleanup.enter_context(
                disturb(
                    surroundings.hogs,
                    at_times=surroundings.at_times,
                    is_disk_busy=surroundings.is_disk_busy,
                    directory=self.cluster.directory,
                    environment=self.cluster.environment(),
                )
            )
            cleanup.callback(self.cluster.end_training, job.job_id)
            self.cluster.start_training(
                job.job_id, plan.ranks, plan.script, *plan.surroundings.arguments
            )
            self._wait_for_start(job)
            record = self._watch(job, plan, cleanup)
        record.arm, record.trainer = "foreign", plan.trainer
        record.job = f"{plan.trainer} on {plan.ranks} ranks, {surroundings.text()}, {record.job}"
        return record

    def _wait_for_start(self, job: ObservedJob) -> None:
        def is_warm() -> bool:
            return job.step >= _WARM_UP_STEPS or job.is_over

        deadline = time.monotonic() + _START_SECONDS
        while not job.is_known() and time.monotonic() < deadline:
            if self.cluster.has_ended():
                break
            time.sleep(0.5)
        if job.is_known() and job.wait_until(is_warm, _START_SECONDS) and not job.is_over:
            return
        raise TrainingFailedError(f"did not start; {self._last_error(job)}")

    def _last_error(self, job: ObservedJob) -> str:
        """Return the lines of the launchers' logs that name errors of ranks, or how they ended.

        Without such lines, return the job's state, its newest reports and the end of the logs.
        """
        logs = [self.cluster.log(job.job_id, node) for node in self.cluster.nodes]
        texts = [log.read_text(errors="replace") for log in logs if log.exists()]
        lines = [line.strip() for text in texts for line in text.splitlines()]
        errors = [line for line in lines if line.startswith("[rank") and "Error" in line]
        errors = errors or [line for line in lines if line.startswith("exitcode")]
        if errors:
            return "; ".join(errors[:3])
        reports = [one["summary"] for one in job.incidents.values()]
        state = f"its log names no error; the job is {job.view.get('state', 'unknown')}"
        return "; ".join([state, *reports[-3:], *lines[-3:]])

    def _watch(self, job: ObservedJob, plan: Plan, cleanup: ExitStack) -> TrialRecord:
        """Record healthy seconds, and then the fault."""
        is_none = plan.kind == "none"
        first = job.step
        began = time.monotonic()
        healthy = self._measure(job, plan, self.none_seconds if is_none else plan.healthy_seconds)
        clean_seconds = time.monotonic() - began
        if is_none:
            record = job.record("none", (), set(), 0)
        else:
            record = self._inject(job, plan, healthy, cleanup)
        record.clean_seconds = clean_seconds
        record.job = f"{record.job} step {healthy.step_seconds * 1000:.0f} ms from step {first}"
        return record

    def _measure(self, job: ObservedJob, plan: Plan, seconds: float) -> _Healthy:
        network, node = self.cluster.network, plan.faulty_rank // (plan.ranks // 2)
        bytes_before = None if network is None else network.sent_bytes(node)
        waits = _CpuWaits(job)
        first = job.step
        job.wait_until(lambda: job.is_over, seconds)
        if job.is_over:
            raise TrainingFailedError(f"ended by itself; {self._last_error(job)}")
        sent = None
        if network is not None and bytes_before is not None:
            sent = (network.sent_bytes(node) - bytes_before) / max(1, job.step - first)
        return _Healthy(_median_step(job.steps(), first), sent, waits.per_step())

    def _inject(
        self, job: ObservedJob, plan: Plan, healthy: _Healthy, cleanup: ExitStack
    ) -> TrialRecord:
        injector = Injector(self.cluster, plan, job.ranks(), healthy.step_seconds, cleanup)
        waits = _CpuWaits(job)
        started = datetime.now().astimezone()
        fault = injector.inject(healthy.sent_bytes_per_step)
        self._await_report(job, plan, fault)
        (fault,) = job.with_onset((fault,), started)
        if plan.fault == "another_op" and injector.has_ended(plan.faulty_rank):
            # gloo aborts a process if another one sends more than it expects.
            fault = replace(fault, kind="crash", headline="SIGABRT")
        if plan.fault == "sigterm" and not injector.has_ended(plan.faulty_rank):
            # The script's own handler hangs: Lightning's begins a broadcast that no other rank has.
            fault = replace(fault, kind="hang", headline="received a signal to end")
        cost = None
        if plan.kind not in _FATAL:
            after = _median_step(job.steps(), fault.onset_step)
            cost = after / healthy.step_seconds - 1.0
            if plan.fault == "hog":
                cost = _more_waiting(plan, healthy, waits.per_step())
            if plan.fault in _MEASURED:
                fault = replace(fault, magnitude=max(cost, 0.0))
        record = job.record(plan.kind, (fault,), set(), 0)
        record.onset_seconds = (started.timestamp(),)
        record.job = "" if cost is None else f"measured cost {cost:.0%}"
        return record

    def _await_report(self, job: ObservedJob, plan: Plan, fault: TrialFault) -> None:
        """Wait until the fault is reported, then for details that arrive later."""
        job.poll()
        goal = job.step + _FAULTY_STEPS
        least = time.monotonic() + _FAULTY_SECONDS
        is_fatal = plan.kind in _FATAL

        def reported() -> list[dict[str, Any]]:
            return [
                incident
                for incident in job.incidents.values()
                if names_fault(finding_of(incident), fault)
            ]

        def is_due() -> bool:
            waited = not is_fatal and job.step >= goal and time.monotonic() >= least
            return bool(reported()) or waited

        job.wait_until(is_due, _FATAL_SECONDS if is_fatal else 120.0)
        if not is_fatal:
            job.wait_until(lambda: False, _CAUSE_SECONDS)
        elif fault.headline:
            job.wait_until(
                lambda: any(fault.headline in one["summary"] for one in reported()),
                _HEADLINE_SECONDS,
            )


class _CpuWaits:
    """How long the main thread of each rank is ready to run without a CPU, from now on."""

    def __init__(self, job: ObservedJob) -> None:
        self._job, self._first = job, job.step
        self._pids = {rank["rank"]: int(rank["pid"]) for rank in job.ranks()}
        self._before = self._seconds()

    def per_step(self) -> dict[int, float]:
        """Return the seconds per step by rank; ranks that have ended are left out."""
        steps = max(1, self._job.step - self._first)
        return {
            rank: (seconds - self._before[rank]) / steps
            for rank, seconds in self._seconds().items()
            if rank in self._before
        }

    def _seconds(self) -> dict[int, float]:
        found = {}
        for rank, pid in self._pids.items():
            with contextlib.suppress(OSError, IndexError):
                found[rank] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        return found


def _more_waiting(plan: Plan, healthy: _Healthy, waits: dict[int, float]) -> float:
    """Return how much longer the faulty rank waits for a CPU, compared with its peers.

    It is a share of the healthy step. On a machine with fewer CPUs than ranks, a process that
    shares the CPU of one rank may slow all ranks, or another one.
    """
    longer = {rank: waits[rank] - healthy.cpu_waits.get(rank, 0.0) for rank in waits}
    own = longer.pop(plan.faulty_rank, 0.0)
    return (own - median(longer.values() or [0.0])) / healthy.step_seconds


def _median_step(steps: Sequence[dict[str, Any]], first: int) -> float:
    """Return the median duration of the steps from `first` on."""
    seconds = [float(step["duration_seconds"]) for step in steps if step["step"] > first]
    return median(seconds or [float(step["duration_seconds"]) for step in steps])
