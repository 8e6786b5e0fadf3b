"""Workers die, freeze and continue: nothing is lost and nothing is done twice.

Final states prove little (an unfenced worker reaches them too), so side effects are counted:
commands, rows of the outbox, incidents and generations.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from simulated_node import SimulatedNode, post_job, stop_all
from sqlalchemy import func, select

from paceline_server.store.database import Database
from paceline_server.store.models import (
    ActionRow,
    CommandRow,
    GenerationRow,
    HotLogRow,
    IncidentRow,
    LeaseRow,
    OutboxRow,
    StepRow,
)
from paceline_wire.commands import StartRanks, StopGeneration

QUICK = {"PACELINE_SERVER_LEASE_SECONDS": "1.0"}
RECEIVER = (
    "--webhook-url",
    "http://127.0.0.1:9/",
    "--allow-local-receivers",
)  # there is no receiver, so rows stay


# SQLite has one writer at a time by itself; a worker of its own is a rare set-up of it.
postgresql_first = pytest.mark.parametrize(
    "database_url",
    ["postgresql", pytest.param("sqlite", marks=pytest.mark.campaign)],
    indirect=True,
)


class Cluster:
    """A server that only serves, workers in separate processes, and three nodes."""

    def __init__(self, url: str, run_process: Callable[..., Any], database: Database) -> None:
        self.url = url
        self._run = run_process
        self.database = database
        self.client = httpx.Client(base_url=url, timeout=60.0, verify=False)
        self.nodes = [SimulatedNode(f"node-{number}", self.url) for number in range(3)]
        for node in self.nodes:
            node.start()

    def worker(self) -> Any:
        worker = self._run("--role", "worker", *RECEIVER, **QUICK)
        worker.wait_until_up()
        return worker

    def stop(self) -> None:
        stop_all(self.nodes)
        self.client.close()

    def job(self, job_id: str) -> Any:
        return self.client.get(f"/api/v1/jobs/{job_id}").raise_for_status().json()

    def crash(self, rank: int) -> None:
        next(node for node in self.nodes if rank in node.ranks).crash(rank)

    def rows(self, table: Any) -> list[Any]:
        with self.database.read() as session:
            return list(session.scalars(select(table)))


@pytest.fixture
def cluster(
    run_server: Callable[..., Any], run_process: Callable[..., Any], database: Database
) -> Iterator[Cluster]:
    made = Cluster(run_server(role="api").url, run_process, database)
    yield made
    made.stop()


def check_side_effects(cluster: Cluster, job_id: str, restarts: int) -> None:
    """Check that each generation was started once on each of its nodes, and each incident alerted
    once."""
    generations = {row.generation: row.placement for row in cluster.rows(GenerationRow)}
    assert sorted(generations) == list(range(1, restarts + 2))
    commands = Counter((row.kind, row.generation, row.agent_id) for row in cluster.rows(CommandRow))
    starts = {key: count for key, count in commands.items() if key[0] == "start_ranks"}
    assert starts == {
        ("start_ranks", number, agent): 1
        for number, placement in generations.items()
        for agent in set(placement.nodes.values())
    }
    carried_out = Counter(
        (command.generation, node.agent_id)
        for node in cluster.nodes
        for command in node.carried_out
        if isinstance(command, StartRanks)
    )
    assert set(carried_out.values()) == {1}
    incidents = [row for row in cluster.rows(IncidentRow) if row.kind == "failure"]
    assert len(incidents) == restarts, [row.view.finding.summary for row in incidents]
    alerts = Counter((row.subject, row.event) for row in cluster.rows(OutboxRow))
    for incident in incidents:
        assert alerts[incident.id, "opened"] == 1
        assert alerts[incident.id, "resolved"] == 1
    restart_actions = [row for row in cluster.rows(ActionRow) if row.kind == "restart"]
    assert [row.state for row in restart_actions] == ["done"] * restarts
    check_steps(cluster, job_id)


def check_steps(cluster: Cluster, job_id: str) -> None:
    """Check that no step of a generation is missing between its first and its last."""
    by_generation: dict[int, list[int]] = {}
    for row in cluster.rows(StepRow):
        by_generation.setdefault(row.generation, []).append(row.step)
    for steps in by_generation.values():
        assert sorted(steps) == list(range(min(steps), max(steps) + 1))


@postgresql_first
def test_a_killed_worker_is_replaced_without_loss_or_repetition(
    cluster: Cluster, wait_for: Callable[..., Any]
) -> None:
    first = cluster.worker()
    job_id = post_job(cluster.url)
    wait_for(lambda: (cluster.job(job_id)["step"] or 0) >= 3, "steps")
    second = cluster.worker()
    cluster.crash(1)
    first.signal(signal.SIGKILL)
    wait_for(lambda: cluster.job(job_id)["generation"] == 2, "the restart by the second worker")
    second.signal(signal.SIGKILL)
    third = cluster.worker()
    wait_for(lambda: cluster.job(job_id)["state"] == "running", "training again", 40.0)
    wait_for(lambda: (cluster.job(job_id)["step"] or 0) >= 5, "steps again")
    third.signal(signal.SIGTERM)
    assert third.process.wait(60) == 0
    check_side_effects(cluster, job_id, restarts=1)
    (lease,) = [row for row in cluster.rows(LeaseRow) if row.name == f"job:{job_id}"]
    assert lease.epoch == 3
    assert lease.expires_ns == 0, "a worker that ends gives its lease back"


def test_a_frozen_worker_cannot_write_after_it_wakes_up(
    cluster: Cluster, wait_for: Callable[..., Any]
) -> None:
    zombie = cluster.worker()
    job_id = post_job(cluster.url)
    wait_for(lambda: (cluster.job(job_id)["step"] or 0) >= 3, "steps")
    freeze(zombie, cluster.database, wait_for)
    cluster.crash(0)
    cluster.worker()
    wait_for(lambda: cluster.job(job_id)["generation"] == 2, "the restart", 40.0)
    zombie.signal(signal.SIGCONT)
    wait_for(lambda: cluster.job(job_id)["state"] == "running", "training again", 40.0)
    wait_for(lambda: (cluster.job(job_id)["step"] or 0) >= 5, "steps again")
    assert zombie.process.poll() is None
    check_side_effects(cluster, job_id, restarts=1)
    stops = [
        command
        for node in cluster.nodes
        for command in node.carried_out
        if isinstance(command, StopGeneration)
    ]
    # Each node once, including the spare, which may run ranks of an earlier generation.
    assert len(stops) == len({command.command_id for command in stops}) == 3


def freeze(worker: Any, database: Database, wait_for: Callable[..., Any]) -> None:
    """Stop the process outside a transaction, by holding the lock of all writers meanwhile.

    PostgreSQL ends a transaction whose client is silent. SQLite cannot: a process that is stopped
    within one blocks all writers until it continues (docs/architecture.md).
    """
    with database.write():
        worker.signal(signal.SIGSTOP)
        wait_for(lambda: states(worker.process.pid) == {"T"}, "the stop of all threads")


def states(pid: int) -> set[str]:
    """Return the states of all threads: the letters of proc(5)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {(thread / "stat").read_text().rpartition(") ")[2][0] for thread in threads}


@postgresql_first
def test_every_acknowledged_batch_survives_the_death_of_the_server(
    run_process: Callable[..., Any], database: Database, wait_for: Callable[..., Any]
) -> None:
    first = run_process("--port", "0")
    cluster = Cluster(first.url(), run_process, database)
    try:
        wait_for(lambda: all(node.acknowledged > 10 for node in cluster.nodes), "batches")
        first.signal(signal.SIGKILL)
        first.process.wait(60)
        acknowledged = [node.acknowledged for node in cluster.nodes]
        assert sum(stored(database).values()) >= sum(acknowledged)
        again = run_process("--port", "0").url()
        for node in cluster.nodes:
            node.url = again
        for node, before in zip(cluster.nodes, acknowledged, strict=True):
            wait_for(lambda: node.acknowledged > before + 5, "batches again")  # noqa: B023 (now)
    finally:
        cluster.stop()
    stored(database)


def stored(database: Database) -> dict[str, int]:
    """Return the batches by node; check that none is missing before the newest."""
    with database.read() as session:
        rows = session.execute(
            select(HotLogRow.agent_id, func.count(), func.max(HotLogRow.sequence)).group_by(
                HotLogRow.agent_id
            )
        ).all()
    assert all(count == highest + 1 for _, count, highest in rows), rows
    return {agent_id: count for agent_id, count, _ in rows}
