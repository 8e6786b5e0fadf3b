"""Repairs of whole nodes: one is lost, with and without a spare, comes back, or is slow.

A training of plain torch (DDP, eight gloo ranks on four emulated nodes, `paceline.Checkpoints`, a
step of `STEP_SECONDS`) runs under `paceline run --preload` in mode `auto`:

- *lost, with a spare*: a node is killed with all of its processes;
- *lost, without one*: another one is killed, so that the job shrinks. Its ranks then take more
  sequences each: the global batch must stay the same;
- *grown back*: the nodes return; the next restart, for a killed rank, has all ranks again;
- *slow*: the ranks of a node become slow, and the job moves to the spare.

The spare has imported what ranks need, as it has beside a job of some minutes. A loss is confirmed
when the server reports it; the time is from then to a step that all ranks have finished. The pause
of the move is the longest time between two steps less one step, in steps of `MOVED_STEP_SECONDS`.
The training function is `@paceline.resilient`: ranks that stay keep their process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.harness import Result
from benchmarks.node import RunningProcess
from paceline_cli.client import Client
from paceline_demo.cluster import GPUS_PER_NODE, Cluster, EmulatedNode
from paceline_demo.faults import lose_node
from paceline_demo.training import start_job

RANKS = 8
NODES = RANKS // GPUS_PER_NODE
STEP_SECONDS = 0.25
MOVED_STEP_SECONDS = 1.0
GLOBAL_BATCH = 24
STEADY_STEPS = 30
WAIT_SECONDS = 180.0
SPARE_GOAL_SECONDS = 2.0
SHRINK_GOAL_SECONDS = 5.0
MOVE_GOAL_STEPS = 2.0

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import paceline

directory = Path(sys.argv[1])
torch.set_num_threads(1)

@paceline.resilient
def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = os.environ["PACELINE_CHECKPOINT_DIRECTORY"]
    state = paceline.Checkpoints(checkpoints, model=model, optimizer=optimizer)
    rows = {batch} // world
    generation = os.environ["PACELINE_GENERATION"]
    node = os.path.basename(os.environ["PACELINE_NODE_DIRECTORY"])
    with open(directory / f"rank-{{rank}}", "a", buffering=1) as log:
        for step in paceline.steps(range(1_000_000), state=state):
            slow = (directory / f"slow-{{node}}").exists()
            time.sleep({seconds} * (1.8 if slow else 1.0))
            model(torch.randn(rows, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{{generation}} {{rows}} {{time.monotonic_ns()}}\\n")

train()
"""


class RankStep(NamedTuple):
    """A finished step of a rank."""

    generation: int
    rows: int  # sequences of the rank
    at_ns: int  # time.monotonic_ns()


def _is_warm(node: EmulatedNode) -> bool:
    """Return whether the fork server of a node has imported all: it needs no CPU for a second."""
    assert node.agent is not None, "it was started"
    servers = RunningProcess(node.agent.pid).family().having("fork_server.py")
    before = [server.cpu_ms for server in servers]
    time.sleep(1.0)
    return bool(servers) and before == [server.cpu_ms for server in servers]


class NotRepairedError(RuntimeError):
    """The job did not train again within the time limit."""


def measure() -> Iterator[Result]:
    try:
        with _running(STEP_SECONDS) as job:
            yield from _losses(job)
        with _running(MOVED_STEP_SECONDS) as job:
            steps = job.move()
            yield Result("slow node, move: longest pause", steps, "steps", goal=MOVE_GOAL_STEPS)
    except NotRepairedError as error:
        print(f"node_repairs: the job did not {error}", file=sys.stderr)


def _losses(job: _Job) -> Iterator[Result]:
    seconds, _ = job.lose(job.node_of_rank(3))
    yield Result("node lost, with a spare", seconds, "s", goal=SPARE_GOAL_SECONDS)
    lost = job.node_of_rank(5)
    seconds, ranks = job.lose(lost)
    yield Result("node lost, no spare: the job shrinks", seconds, "s", goal=SHRINK_GOAL_SECONDS)
    yield Result("node lost, no spare: ranks", len(ranks), "ranks", RANKS)
    batch = sum(rank.rows for rank in ranks)
    yield Result("node lost, no spare: global batch", batch, "sequences", GLOBAL_BATCH)
    ranks = job.grow_back(lost)
    yield Result("node back: ranks after the next restart", len(ranks), "ranks", RANKS)


@contextmanager
def _running(step_seconds: float) -> Iterator[_Job]:
    cluster = Cluster(NODES + 1, 0)
    try:
        cluster.start()
        with Client(cluster.url, None) as client:
            yield _Job(cluster, client, step_seconds)
    finally:
        cluster.close()
        cluster.remove_logs()


class _Job:
    """The training on its cluster."""

    def __init__(self, cluster: Cluster, client: Client, step_seconds: float) -> None:
        self._cluster, self._client, self._step_seconds = cluster, client, step_seconds
        self._directory = cluster.directory / "training"
        self._directory.mkdir()
        script = self._directory / "train.py"
        script.write_text(SCRIPT.format(batch=GLOBAL_BATCH, seconds=step_seconds))
        options = ("--preload", "torch.nn.parallel", "--preload", "paceline.checkpoints")
        command = (sys.executable, str(script), str(self._directory))
        self._job_id = start_job(cluster, (RANKS, 1, 1), "auto", command, options=options)
        self._await_steps(0, "start")
        names = {one["node"] for one in self._ranks()}
        spare = next(node for node in cluster.nodes if node.agent_id not in names)
        self._await(lambda: _is_warm(spare), "have its spare import what ranks need")

    def node_of_rank(self, rank: int) -> EmulatedNode:
        names = {one["rank"]: one["node"] for one in self._ranks()}
        return next(node for node in self._cluster.nodes if node.agent_id == names[rank])

    def lose(self, node: EmulatedNode) -> tuple[float, list[RankStep]]:
        """Kill a node. Return the seconds from its report to a step of all ranks, and these."""
        generation = self._generation()
        lose_node(node)
        ranks = self._await_steps(generation + 1, "train without the lost node")
        return self._repair_seconds(node), ranks

    def grow_back(self, node: EmulatedNode) -> list[RankStep]:
        """Start the node again, release it, kill a rank. Return the next generation's ranks."""
        generation = self._generation()
        self._cluster.start_agent(node)
        self._client.post(f"/nodes/{node.agent_id}/release")
        self._await(lambda: self._is_usable(node), "have the node back")
        os.kill(self._ranks()[1]["pid"], signal.SIGKILL)
        return self._await_steps(generation + 1, "grow back")

    def move(self) -> float:
        """Make a node slow. Return how much later than usual a step ended at most, in steps."""
        generation = self._generation()
        (self._directory / f"slow-{self.node_of_rank(3).agent_id}").touch()
        self._await_steps(generation + 1, "move to the spare")
        times = [step.at_ns for step in self._made(0)]
        longest = max(later - earlier for earlier, later in pairwise(times)) / 1e9
        return longest / self._step_seconds - 1.0

    def _job(self) -> dict[str, Any]:
        job: dict[str, Any] = self._client.get(f"/jobs/{self._job_id}")
        return job

    def _generation(self) -> int:
        return int(self._job()["generation"])

    def _ranks(self) -> list[dict[str, Any]]:
        return self._client.items(f"/jobs/{self._job_id}/ranks")

    def _is_usable(self, node: EmulatedNode) -> bool:
        nodes = self._client.items("/nodes")
        return any(one["id"] == node.agent_id and one["state"] == "ready" for one in nodes)

    def _repair_seconds(self, node: EmulatedNode) -> float:
        """Return the time from the report of a lost node to the first step without it."""

        def recovery() -> dict[str, float] | None:
            incidents = self._client.items("/incidents", job=self._job_id)
            found = [one for one in incidents if one["node"] == node.agent_id]
            known = found[-1]["recovery"] if found else None
            return known if known and known["total_seconds"] is not None else None

        self._await(lambda: recovery() is not None, "report the repair")
        parts = recovery()
        assert parts is not None
        return parts["total_seconds"] - (parts["detect_seconds"] or 0.0)

    def _await_steps(self, generation: int, what: str) -> list[RankStep]:
        """Wait until all ranks have made some steps. Return the last of each."""

        def are_steady() -> bool:
            job = self._job()
            world = job["topology"]["dp"]
            made = [self._made(rank, generation) for rank in range(world)]
            return job["generation"] >= generation and all(len(one) >= STEADY_STEPS for one in made)

        self._await(are_steady, what)
        world = self._job()["topology"]["dp"]
        return [self._made(rank, generation)[-1] for rank in range(world)]

    def _made(self, rank: int, generation: int = 0) -> list[RankStep]:
        path = self._directory / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [RankStep(*map(int, line.split())) for line in lines]
        return [step for step in steps if step.generation >= generation]

    def _await(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_done():
            if time.monotonic() > deadline or self._job()["state"] in ("failed", "finished"):
                raise NotRepairedError(f"{what} within {WAIT_SECONDS:.0f} s")
            time.sleep(0.2)
