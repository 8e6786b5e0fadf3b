"""One fault injected into a running job: the required and the actual outcome."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from paceline_cli.client import Client
from paceline_demo.cluster import EmulatedNode
from paceline_demo.training import start_job
from paceline_evaluation.repair.cluster import Database, Need, RepairCluster, wait_until
from paceline_evaluation.repair.trainings import (
    END_MARGIN_STEPS,
    StepLog,
    Training,
    compare,
    last_checkpoint,
    run_uninterrupted,
)

STEADY_STEPS = 12
STEADY_SECONDS = 600.0  # a busy host takes minutes to start a training
OUTCOME_SECONDS = 180.0
SETTLE_SECONDS = 4.0
ALONE_SECONDS = 12.0  # a restart would have begun by then
_INCIDENT_SECONDS = 60.0  # until the next checkpoint fails: on a busy host steps are slow
_NEW_STEPS = 5
_END_SECONDS = 60.0
_ENDED = ("failed", "finished", "stopped")
NOT_PLAYED = "not played"

Outcome = Literal["restart", "alone", "either", "end"]


@dataclass(frozen=True)
class FaultPlan:
    """A fault of the arm.

    Args:
        kind: as in `--kinds`.
        name: as in the table of results.
        inject: injects it into the running job and returns its target.
        outcome: `restart`: the job must be restarted; `alone`: it must continue without a restart;
            `either`: both are correct; `end`: the job must end, because restarts do not help.
        database: that it needs; None: either.
        needs: what this machine must provide.
        needs_manifests: whether the checkpoints must be Paceline's.
    """

    kind: str
    name: str
    inject: Callable[[RunningJob], Hit]
    outcome: Outcome = "restart"
    database: Database | None = None
    needs: Need | None = None
    needs_manifests: bool = False


@dataclass
class Hit:
    """The target of a fault: ranks and nodes that may be blamed; none if both are empty."""

    text: str
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    restarts: int = 1  # highest correct number of restarts
    heal: Callable[[], None] = lambda: None  # called once the outcome is known
    heal_first: bool = False  # whether the outcome comes only after `heal`
    heal_after_seconds: float = 0.0
    lost_checkpoints: int = 0  # newest checkpoints that the fault itself destroyed
    damaged: int = 0  # checkpoints that may be set aside
    needs_incident: str = ""  # kind of an incident that must be reported


@dataclass
class TrialResult:
    """The outcome of one fault, judged."""

    kind: str
    fault: str
    trainer: str
    launcher: str = "paceline"
    number: int = 0  # among the trials of its kind
    hit: str = ""
    required: Outcome = "restart"
    outcome: str = ""  # "recovered", "left alone", "ended", or what went wrong
    is_right: bool = False
    seconds: float | None = None  # to the first new step; left alone: the longest pause
    restarts: int = 0
    duplicates: int = 0  # restarts beyond those that the fault needs
    wrong_restarts: int = 0  # restarts of a job that could go on
    wrong_culprits: list[str] = field(default_factory=list)
    steps_destroyed: int = 0
    lost_steps: int = 0
    orphans: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def was_played(self) -> bool:
        """Whether the fault could be injected."""
        return not self.outcome.startswith(NOT_PLAYED)


@dataclass
class FinalState:
    """The last checkpoint of a job after its faults, compared with an uninterrupted run."""

    trainer: str
    steps: int
    faults: int
    different: list[str] | None = None  # values that differ; None: there was nothing to compare
    values: int = 0
    largest: float = 0.0  # difference, relative to the largest value of the tensor
    note: str = ""


def is_good(result: TrialResult) -> bool:
    """Return whether the outcome is as required."""
    harm = result.duplicates or result.wrong_restarts or result.steps_destroyed or result.orphans
    return result.is_right and not result.wrong_culprits and not harm


@dataclass
class RunningJob:
    """A job on a cluster, its log and its files."""

    cluster: RepairCluster
    client: Client
    training: Training
    number: int
    chance: random.Random = field(default_factory=random.Random)  # random choices of the trial
    job_id: str = ""
    faults: int = 0
    # restarts up to the end of the last trial; None: there was none, or its outcome was wrong
    judged_restarts: set[str] | None = None
    # generation and incidents at the end of the last healthy minute; None: there was none
    watched: tuple[int, set[str]] | None = None

    def __post_init__(self) -> None:
        name = f"{self.number}-{self.training.name}"
        self.checkpoints = self.cluster.directory / f"checkpoints-{name}"
        self.orders = self.cluster.memory / f"orders-{name}"
        self.orders.mkdir(exist_ok=True)
        self.log = StepLog(self.orders)

    def start(self) -> None:
        policy = ("restarts_per_hour=1000", "restarts_per_day=10000", "start_timeout_seconds=90")
        environment = (
            f"ORDERS={self.orders}",
            f"STEP_SECONDS={self.training.pause_seconds}",
            f"CHECKPOINT_STEPS={self.training.checkpoint_steps}",
        )
        self.job_id = start_job(
            self.cluster,
            self.training.axes,
            "auto",
            self.training.command(),
            options=(
                *("--name", self.training.name),
                *(word for module in self.training.preload for word in ("--preload", module)),
                *(word for value in policy for word in ("--policy", value)),
                *(word for value in environment for word in ("--environment", value)),
            ),
            checkpoints_name=self.checkpoints.name,
        )

    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/jobs/{self.job_id}")
        return found

    def ranks(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")

    def incidents(self) -> dict[str, dict[str, Any]]:
        return {item["id"]: item for item in self.client.items("/incidents", job=self.job_id)}

    def restarts(self) -> dict[str, dict[str, Any]]:
        actions = self.client.items("/actions", job=self.job_id)
        return {item["id"]: item for item in actions if item["kind"] == "restart"}

    def late_restarts(self) -> list[dict[str, Any]]:
        """Return the restarts since the last fault was judged, which needed no more."""
        known = self.judged_restarts
        return [
            item for key, item in self.restarts().items() if known is not None and key not in known
        ]

    def node(self, agent_id: str) -> EmulatedNode:
        return self.cluster.nodes[int(agent_id.removeprefix("node-"))]

    def committed(self) -> list[tuple[int, Path]]:
        return self.training.committed(self.checkpoints)

    def damaged(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("damaged-*")}

    def order(self, rank: int, **order: Any) -> None:
        """Order a rank to fail before its next step."""
        send_order(self.orders, rank, **order)

    def orphans(self) -> list[int]:
        """Return rank processes that do not belong to the job's current generation."""
        current = (self.job_id, self.job()["generation"])
        found = []
        for pid in self.cluster.processes():
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                environment = dict(re.findall(r"(\w+)=([^\0]*)", content))
                # A fork server reserves space for its children's generation, filled with the digit
                # 0.
                generation = int(environment.get("PACELINE_GENERATION") or 0)
                if generation and (environment["PACELINE_JOB"], generation) != current:
                    found.append(pid)
        return found

    def is_steady(self) -> bool:
        """Return whether the job runs, has saved a checkpoint, and has all nodes."""
        job = self.job()
        if job["state"] in _ENDED:
            raise click.ClickException(f"the job is {job['state']}: {job['verdict']['text']}")
        for node in self.client.items("/nodes"):
            if node["state"] == "quarantined":
                self.client.post(f"/nodes/{node['id']}/release")
        first = self.log.first_common(self.pids())
        if first is None:
            return False
        saved = self.committed()
        has_saved = self.training.checkpoint_steps == 0 or (
            bool(saved) and saved[-1][0] > first.completed
        )
        return (
            job["state"] == "running"
            and self.log.newest() >= first.completed + STEADY_STEPS
            and has_saved
            and self.has_all_nodes()
        )

    def has_all_nodes(self) -> bool:
        states = [node["state"] for node in self.client.items("/nodes")]
        return states.count("ready") == len(self.cluster.nodes)

    def pids(self) -> dict[int, int]:
        """Return the process of each rank, as the server knows it."""
        return {rank["rank"]: rank["pid"] for rank in self.ranks()}

    def make_steady(self) -> None:
        """Wait until the next fault can be injected; start the job if it does not run.

        Raises:
            click.ClickException: the job has ended, or does not become steady.
        """
        if not self.job_id:
            self.start()
        if not wait_until(unless_away(self.is_steady), STEADY_SECONDS):
            nodes = [(node["id"], node["state"]) for node in self.client.items("/nodes")]
            raise click.ClickException(
                f"the job did not become steady: {self.job()['verdict']['text']}; nodes {nodes}"
            )

    def finish(self) -> FinalState:
        """End the job after its last step, and compare that with an uninterrupted run."""
        steps = self.log.newest() + END_MARGIN_STEPS
        # Not a step that is saved anyway: the last checkpoint would exist already.
        steps += 7 - steps % self.training.checkpoint_steps
        _replace(self.orders / "end", str(steps))
        state = FinalState(self.training.name, steps, self.faults)
        if not wait_until(unless_away(lambda: self.job()["state"] in _ENDED), _END_SECONDS):
            state.note = f"the job did not end at step {steps}"
            return state
        one = last_checkpoint(self.training, self.checkpoints, steps)
        directory = self.cluster.directory / f"uninterrupted-{self.orders.name}"
        other = run_uninterrupted(self.training, steps, directory, self.cluster.environment())
        if one is None or other is None:
            run = "uninterrupted run" if other is None else "job"
            log = (directory / "log").read_text()[-2000:]
            state.note = (
                f"the {run} has no checkpoint of step {steps}: {self.job()['verdict']}{log}"
            )
            return state
        try:
            state.values, state.different, state.largest = compare(one, other)
        except subprocess.CalledProcessError as error:
            state.note = f"the last checkpoint cannot be read: {error.stderr[-2000:]}"
        return state


def play(plan: FaultPlan, running: RunningJob) -> TrialResult:
    """Inject one fault into a steady job and judge the outcome."""
    running.make_steady()
    running.faults += 1
    time.sleep(running.chance.uniform(0.0, 2.0))
    before = running.job()
    pids, newest = running.log.pids(), running.log.newest()
    late = running.late_restarts()
    incidents, restarts = set(running.incidents()), set(running.restarts())
    damaged, committed = running.damaged(), running.committed()

    def found_incidents() -> list[dict[str, Any]]:
        return [item for key, item in running.incidents().items() if key not in incidents]

    def has_needed() -> bool:
        return hit.needs_incident in {item["kind"] for item in found_incidents()}

    injected = time.monotonic()
    hit = plan.inject(running)
    if committed and hit.lost_checkpoints:
        committed = committed[: -hit.lost_checkpoints]
    try:
        if hit.heal_first:
            time.sleep(hit.heal_after_seconds)
            hit.heal()
        reached = _wait_for_outcome(plan, running, before)
        if hit.needs_incident:
            wait_until(unless_away(has_needed), _INCIDENT_SECONDS)
    finally:
        if not hit.heal_first:
            hit.heal()
    now = time.monotonic()
    time.sleep(SETTLE_SECONDS)
    new_incidents = found_incidents()
    new_restarts = [item for key, item in running.restarts().items() if key not in restarts]
    carried_out = _carried_out(new_restarts)
    result = TrialResult(
        kind=plan.kind,
        fault=plan.name,
        trainer=running.training.name,
        hit=hit.text,
        required=plan.outcome,
        outcome=reached,
        is_right=reached in ("recovered", "left alone", "ended"),
        restarts=carried_out,
        duplicates=0 if plan.outcome == "alone" else max(0, carried_out - hit.restarts),
        wrong_restarts=_carried_out(late) + (carried_out if plan.outcome == "alone" else 0),
        wrong_culprits=_wrong_culprits(running, hit, new_incidents, new_restarts),
        orphans=0 if wait_until(lambda: not running.orphans(), 40.0) else len(running.orphans()),
    )
    if reached == "left alone":
        result.seconds = running.log.longest_pause(injected, now)
    elif reached == "recovered":
        judge_recovery(result, running.log, pids, newest, injected, committed)
    if result.seconds is not None:
        result.seconds = round(result.seconds, 2)
    if len(running.damaged() - damaged) > hit.damaged:
        result.notes.append(f"set aside: {sorted(running.damaged() - damaged)}")
        result.steps_destroyed += 1
    if hit.needs_incident and hit.needs_incident not in {item["kind"] for item in new_incidents}:
        result.notes.append(f"no incident of kind {hit.needs_incident}")
        result.is_right = False
    result.notes += [f"restarted before the fault: {item['reason']}" for item in late]
    result.notes += [f"{item['kind']}: {item['summary']}" for item in new_incidents]
    running.judged_restarts = {*restarts, *(item["id"] for item in new_restarts)}
    if not result.is_right:
        running.judged_restarts = None  # what follows may be its late repair
    return result


def judge_recovery(
    result: TrialResult,
    log: StepLog,
    pids: dict[int, int],
    newest: int,
    injected_seconds: float,
    committed: list[tuple[int, Path]],
) -> None:
    """Set how long the recovery took and what it repeated.

    Args:
        result: of the trial.
        log: of the job.
        pids: the processes before the fault, by rank.
        newest: steps that all ranks had completed when the fault was injected; they may complete
            more until they are replaced.
        injected_seconds: when the fault was injected.
        committed: the intact checkpoints at that time, the best one last.
    """
    first = log.first_common(log.pids())
    if first is None or log.pids()[0] == pids[0]:
        return  # the ranks were not replaced
    resumed = min(steps[0].completed for steps in log.of_process(log.pids())) - 1
    result.seconds = first.at_seconds - injected_seconds
    finished = max(newest, _finished_until_replaced(log, pids, injected_seconds))
    result.lost_steps = max(0, finished - resumed)
    if committed:
        result.steps_destroyed = max(0, committed[-1][0] - resumed)


def _finished_until_replaced(log: StepLog, pids: dict[int, int], injected_seconds: float) -> int:
    """Return how many steps all ranks had completed in the processes before the newest ones."""
    now = log.pids()
    completed = [
        [
            step.completed
            for step in steps
            if step.pid != now[rank]
            and (step.pid == pids[rank] or step.at_seconds >= injected_seconds)
        ]
        for rank, steps in enumerate(log.read())
    ]
    return min(max(steps, default=0) for steps in completed)


def _wait_for_outcome(plan: FaultPlan, running: RunningJob, before: dict[str, Any]) -> str:
    generation, step = before["generation"], running.log.newest()
    found = ["nothing"]

    def is_reached() -> bool:
        job = running.job()
        found[0] = f"{job['state']}, generation {job['generation']}, step {job['step']}"
        if job["state"] in _ENDED:
            found[0] = "ended"
            return True
        if job["state"] != "running" or plan.outcome == "end":
            return False  # a job that must end repeats steps before that, more than once
        if job["generation"] > generation:
            found[0] = "recovered"
            steps = running.log.of_process(running.pids())
            return all(len(own) >= _NEW_STEPS for own in steps)
        # Reached only after a time in which a restart would have begun.
        found[0] = "left alone"
        seconds = time.monotonic() - begun
        went_on = running.log.newest() >= step + 20
        return plan.outcome != "restart" and seconds > ALONE_SECONDS and went_on

    begun = time.monotonic()
    reached = wait_until(unless_away(is_reached), OUTCOME_SECONDS)
    right = {
        "restart": {"recovered"},
        "alone": {"left alone"},
        "either": {"recovered", "left alone"},
        "end": {"ended"},
    }[plan.outcome]
    if reached and found[0] in right:
        return found[0]
    return f"expected {' or '.join(sorted(right))}: {found[0]}"


def send_order(orders: Path, rank: int, **order: Any) -> None:
    """Order a rank to fail before its next step."""
    _replace(orders / f"order.{rank}", json.dumps(order))


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"new.{path.name}")
    new.write_text(text)
    new.rename(path)


def unless_away(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return a condition that is false while the server does not respond."""

    def check() -> bool:
        try:
            return condition()
        except click.ClickException as error:
            if "job is" in str(error):
                raise
            return False

    return check


def _wrong_culprits(
    running: RunningJob,
    hit: Hit,
    incidents: list[dict[str, Any]],
    restarts: list[dict[str, Any]],
) -> list[str]:
    """Return the incidents that blame a rank or node that the fault did not hit."""
    wrong = []
    for incident in incidents:
        is_wrong_rank = incident["rank"] is not None and incident["rank"] not in hit.ranks
        is_wrong_node = incident["node"] is not None and incident["node"] not in hit.nodes
        caused_restart = any(item["incident_id"] == incident["id"] for item in restarts)
        is_serious = incident["kind"] in ("failure", "hang") or caused_restart
        if is_serious and (is_wrong_rank or is_wrong_node):
            wrong.append(f"{incident['kind']}: {incident['summary']}")
    wrong += [
        f"{node['id']} was quarantined: {node['reason']}"
        for node in running.client.items("/nodes")
        if node["state"] == "quarantined" and node["id"] not in hit.nodes
    ]
    return wrong


def _carried_out(restarts: list[dict[str, Any]]) -> int:
    return sum(item["state"] not in ("proposed", "rejected", "superseded") for item in restarts)


def nodes_of(ranks: list[dict[str, Any]], numbers: set[int]) -> set[str]:
    """Return the nodes of these ranks."""
    return {rank["node"] for rank in ranks if rank["rank"] in numbers}
