"""One fault injected into a running job: the required and the actual outcome."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from paceline_cli.client import Client
from paceline_demo.cluster import GPUS_PER_NODE, EmulatedNode
from paceline_demo.training import start_training
from tests.reliability.cluster import CampaignCluster, wait_until

TRAINER = Path(__file__).with_name("faulty_trainer.py")
AXES = (2, 2, 1)
WORLD = 4
CHECKPOINT_STEPS = 10
STEADY_STEPS = 12
STEADY_SECONDS = 180.0
OUTCOME_SECONDS = 180.0
SETTLE_SECONDS = 4.0
_CHECKPOINT = re.compile(r"step-(\d+)\.generation-(\d+)")
_ENDED = ("failed", "finished", "stopped")

Outcome = Literal["restart", "alone", "either", "end"]


@dataclass(frozen=True)
class FaultPlan:
    """A fault of the campaign.

    Args:
        name: as in the table of results.
        times: how many times the campaign injects it.
        inject: injects it into the running job and returns its target.
        outcome: `restart`: the job must be restarted; `alone`: it must continue without a restart;
            `either`: both are correct; `end`: the job must end, because restarts do not help.
        session: the cluster that it needs, see `run`.
    """

    name: str
    times: int
    inject: Callable[[RunningJob], Hit]
    outcome: Outcome = "restart"
    session: str = "default"


@dataclass
class Hit:
    """The target of a fault: ranks and nodes that may be blamed; none if both are empty."""

    text: str
    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    anyone: bool = False  # whether the fault hits all of them
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

    fault: str
    hit: str
    outcome: str  # "recovered", "left alone", "ended", or what went wrong
    seconds: float
    is_right: bool
    wrong_culprits: list[str]
    duplicates: int
    steps_destroyed: int
    lost_steps: int
    orphans: int
    notes: list[str] = field(default_factory=list)


def is_good(result: TrialResult) -> bool:
    """Return whether the outcome is as required."""
    harm = result.duplicates or result.steps_destroyed or result.orphans
    return result.is_right and not result.wrong_culprits and not harm


@dataclass
class RunningJob:
    """A job on a cluster, and what the campaign knows about it."""

    cluster: CampaignCluster
    client: Client
    chance: random.Random
    job_id: str = ""
    number: int = 0
    checkpoints: Path = Path()

    def start(self) -> None:
        """Start a new job with its own checkpoints."""
        self.number += 1
        name = f"checkpoints-{self.number}"
        self.checkpoints = self.cluster.directory / name
        (self.checkpoints / "orders").mkdir(parents=True)
        self.job_id = start_training(
            self.cluster,
            AXES,
            "auto",
            *("--layers", "2", "--width", "32", "--global-batch-size", "8"),
            *("--checkpoint-every", str(CHECKPOINT_STEPS), "--emulate-kernel-ms", "5,10"),
            checkpoints_name=name,
            program=(str(TRAINER),),
            policy=("restarts_per_hour=1000", "restarts_per_day=10000", "start_timeout_seconds=90"),
        )

    def job(self) -> dict[str, Any]:
        return self.client.get(f"/jobs/{self.job_id}")

    def ranks(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")

    def incidents(self) -> dict[str, dict[str, Any]]:
        return {item["id"]: item for item in self.client.items("/incidents", job=self.job_id)}

    def restarts(self) -> dict[str, dict[str, Any]]:
        actions = self.client.items("/actions", job=self.job_id)
        return {item["id"]: item for item in actions if item["kind"] == "restart"}

    def node(self, agent_id: str) -> EmulatedNode:
        return self.cluster.nodes[int(agent_id.removeprefix("node-"))]

    def committed(self) -> list[tuple[int, int, Path]]:
        """Return generation, step and directory of each committed checkpoint, oldest first."""
        found = []
        for path in self.checkpoints.iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match and (path / "COMMITTED").exists():
                found.append((int(match[2]), int(match[1]), path))
        return sorted(found)

    def damaged(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("damaged-*")}

    def order(self, rank: int, **order: Any) -> None:
        """Order a rank to fail before its next step."""
        path = self.checkpoints / "orders" / str(rank)
        path.with_suffix(".new").write_text(json.dumps(order))
        path.with_suffix(".new").rename(path)

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
        steps = self.steps_of(job["generation"])
        saved = any(generation == job["generation"] for generation, _, _ in self.committed())
        nodes = self.client.items("/nodes")
        for node in nodes:
            if node["state"] == "quarantined":
                self.client.post(f"/nodes/{node['id']}/release")
        return (
            job["state"] == "running"
            and len(steps) >= STEADY_STEPS
            and saved
            and sum(node["state"] == "ready" for node in nodes) == len(self.cluster.nodes)
        )

    def steps_of(self, generation: int) -> list[int]:
        """Return the newest steps of this generation, ascending."""
        items = self.client.get(f"/jobs/{self.job_id}/steps", limit=200)["items"]
        return sorted(item["step"] for item in items if item["generation"] == generation)


def play(plan: FaultPlan, running: RunningJob) -> TrialResult:
    """Inject one fault into a steady job and judge the outcome."""
    _make_steady(running)
    time.sleep(running.chance.uniform(0.0, 2.0))
    before = running.job()
    incidents, restarts = set(running.incidents()), set(running.restarts())
    damaged = running.damaged()
    committed = running.committed()
    injected = time.monotonic()
    hit = plan.inject(running)
    if committed and hit.lost_checkpoints:
        committed = committed[: -hit.lost_checkpoints]
    try:
        if hit.heal_first:
            time.sleep(hit.heal_after_seconds)
            hit.heal()
        reached = _wait_for_outcome(plan, running, before)
        seconds = time.monotonic() - injected
    finally:
        if not hit.heal_first:
            hit.heal()
    time.sleep(SETTLE_SECONDS)
    new_incidents = [item for key, item in running.incidents().items() if key not in incidents]
    new_restarts = [item for key, item in running.restarts().items() if key not in restarts]
    result = TrialResult(
        fault=plan.name,
        hit=hit.text,
        outcome=reached,
        seconds=round(seconds, 1),
        is_right=reached in ("recovered", "left alone", "ended"),
        wrong_culprits=_wrong_culprits(running, hit, new_incidents, new_restarts),
        duplicates=max(0, _carried_out(new_restarts) - hit.restarts),
        steps_destroyed=_steps_destroyed(new_restarts, committed),
        lost_steps=sum(item["lost_steps"] or 0 for item in new_restarts),
        orphans=0 if wait_until(lambda: not running.orphans(), 40.0) else len(running.orphans()),
    )
    if len(running.damaged() - damaged) > hit.damaged:
        result.notes.append(f"set aside: {sorted(running.damaged() - damaged)}")
        result.steps_destroyed += 1
    if hit.needs_incident and hit.needs_incident not in {item["kind"] for item in new_incidents}:
        result.notes.append(f"no incident of kind {hit.needs_incident}")
        result.is_right = False
    result.notes += [f"{item['kind']}: {item['summary']}" for item in new_incidents]
    return result


def _make_steady(running: RunningJob) -> None:
    if not running.job_id or running.job()["state"] in _ENDED:
        running.start()
    if not wait_until(_unless_away(running.is_steady), STEADY_SECONDS):
        raise click.ClickException(
            f"the job did not become steady: {running.job()['verdict']['text']}; nodes "
            f"{[(node['id'], node['state']) for node in running.client.items('/nodes')]}"
        )


def _wait_for_outcome(plan: FaultPlan, running: RunningJob, before: dict[str, Any]) -> str:
    generation, step = before["generation"], before["step"] or 0
    found = ["nothing"]

    def is_reached() -> bool:
        job = running.job()
        found[0] = f"{job['state']}, generation {job['generation']}, step {job['step']}"
        if job["state"] in _ENDED:
            found[0] = "ended"
            return True
        if job["state"] != "running":
            return False
        if job["generation"] > generation:
            found[0] = "recovered"
            return len(running.steps_of(job["generation"])) >= 5
        # Reached only after a time in which a restart would have begun.
        found[0] = "left alone"
        seconds = time.monotonic() - begun
        return plan.outcome != "restart" and seconds > 12.0 and (job["step"] or 0) >= step + 20

    begun = time.monotonic()
    reached = wait_until(_unless_away(is_reached), OUTCOME_SECONDS)
    right = {
        "restart": {"recovered"},
        "alone": {"left alone"},
        "either": {"recovered", "left alone"},
        "end": {"ended"},
    }[plan.outcome]
    if reached and found[0] in right:
        return found[0]
    return f"expected {' or '.join(sorted(right))}: {found[0]}"


def _unless_away(condition: Callable[[], bool]) -> Callable[[], bool]:
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
    if hit.anyone:
        return []
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


def _steps_destroyed(restarts: list[dict[str, Any]], committed: list[tuple[int, int, Path]]) -> int:
    """Return how many steps before the newest commit at the time of the fault were repeated."""
    resumed = [item["resumed_step"] for item in restarts if item["resumed_step"] is not None]
    return max(0, committed[-1][1] - min(resumed)) if resumed and committed else 0


def nodes_of(ranks: list[dict[str, Any]], numbers: set[int]) -> set[str]:
    """Return the nodes of these ranks."""
    return {rank["node"] for rank in ranks if rank["rank"] in numbers}


assert AXES[0] * AXES[1] * AXES[2] == WORLD
assert WORLD % GPUS_PER_NODE == 0
