"""One tick: the snapshot is only read, and nothing is written without the lease."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import to_builtins
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.request import requested_restart
from paceline_server.decide.types import ActionView, LaunchResult, Phase
from paceline_server.metrics import BackgroundMetrics
from paceline_server.policy import Policy
from paceline_server.store import models
from paceline_server.store.actions import action_columns
from paceline_server.store.database import Database
from paceline_server.store.leases import LeaseLostError, acquire, lease_name
from paceline_server.store.log import append
from paceline_server.worker.commit import AlertTargets, ConflictError
from paceline_server.worker.decide import is_ending_generation
from paceline_server.worker.snapshot import load_snapshot
from paceline_server.worker.tick import JobLease, JobWorker, TickSettings
from paceline_wire.batch import AgentHello, Batch, RankAttached, encode
from paceline_wire.commands import StartRanks
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates
from tests.server.rows import ONE_RANK, toy_job

SECOND = 1_000_000_000
START_NS = 1_700_000_000 * SECOND
JOB = "job-1"
SETTINGS = TickSettings(
    lease_ns=SECOND,
    batches=100,
    batch_bytes=1 << 20,
    alert_targets=AlertTargets(("webhook",), ("webhook",)),
)


@pytest.fixture
def store(database: Database) -> Database:
    """A pending job, and a node that has sent a batch."""
    hello = AgentHello(
        time_ns=START_NS,
        version="1",
        hostname="node-0",
        address="127.0.0.1",
        rendezvous_port=1,
        slots=1,
        gpus=[],
    )
    batch = Batch(agent_id="node-0", boot_id="boot", sequence=0, packed_ns=START_NS, events=[hello])
    with database.write() as session:
        session.add(toy_job(JOB, state="pending", generation=0, policy=Policy()))
        session.add(
            models.NodeRow(
                agent_id="node-0",
                boot_id="boot",
                sequence=0,
                packed_ns=START_NS,
                last_seen_ns=START_NS,
                hello=hello,
                readings={},
                dropped_batches=0,
            )
        )
        append(session, batch, encode(batch), START_NS)
    return database


def job_worker(store: Database, owner: str) -> JobWorker:
    with store.write() as session:
        epoch = acquire(session, lease_name(JOB), owner, START_NS, SETTINGS.lease_ns)
    assert epoch is not None
    metrics = BackgroundMetrics(CollectorRegistry())
    return JobWorker(store, metrics, SETTINGS, JobLease(JOB, owner, epoch), lambda: START_NS)


def rows(store: Database) -> dict[str, list[Any]]:
    """Return every row of the tables that a tick writes, except the leases."""
    tables = [table for table in models.Base.metadata.sorted_tables if table.name != "leases"]
    with store.read() as session:
        return {table.name: list(session.execute(select(table)).all()) for table in tables}


def test_a_tick_does_not_change_its_snapshot(store: Database) -> None:
    worker = job_worker(store, "first")
    snapshot = worker.snapshot(START_NS)
    before = copy.deepcopy(snapshot)
    fed = worker.feed(snapshot)
    detected = worker.detect(snapshot, fed, START_NS)
    decision = worker.decide(snapshot, detected, START_NS)
    commit = worker.prepare(snapshot, detected, decision, START_NS)
    worker.commit(snapshot, commit, START_NS)
    assert snapshot == before
    assert (snapshot.columns.state, commit.columns.state) == ("pending", "starting")
    assert [type(issued.command) for issued in decision.commands] == [StartRanks]


def test_the_stages_before_the_commit_write_nothing(store: Database) -> None:
    worker = job_worker(store, "first")
    before = rows(store)
    snapshot = worker.snapshot(START_NS)
    detected = worker.detect(snapshot, worker.feed(snapshot), START_NS)
    decision = worker.decide(snapshot, detected, START_NS)
    commit = worker.prepare(snapshot, detected, decision, START_NS)
    assert commit.is_urgent
    ids = "counters"  # reserved in a separate transaction
    assert {**rows(store), ids: None} == {**before, ids: None}


def test_nothing_is_written_when_the_fence_fails(store: Database) -> None:
    worker = job_worker(store, "first")
    snapshot = worker.snapshot(START_NS)
    detected = worker.detect(snapshot, worker.feed(snapshot), START_NS)
    decision = worker.decide(snapshot, detected, START_NS)
    commit = worker.prepare(snapshot, detected, decision, START_NS)
    with store.write() as session:
        later_ns = START_NS + 2 * SETTINGS.lease_ns
        assert acquire(session, lease_name(JOB), "second", later_ns, SETTINGS.lease_ns) is not None
    before = rows(store)
    with pytest.raises(LeaseLostError):
        worker.commit(snapshot, commit, START_NS)
    assert rows(store) == before


def test_a_job_does_not_end_with_a_request_that_arrived_meanwhile(store: Database) -> None:
    """It would be left to the next external job of that name."""
    worker = job_worker(store, "first")
    snapshot = worker.snapshot(START_NS)
    detected = worker.detect(snapshot, worker.feed(snapshot), START_NS)
    decision = msgspec.structs.replace(
        worker.decide(snapshot, detected, START_NS), state="finished"
    )
    commit = worker.prepare(snapshot, detected, decision, START_NS)
    view = requested_restart("act-1", generation=0, created_ns=START_NS, by="ada")
    with store.write() as session:
        session.add(models.ActionRow(**action_columns(JOB, view), version=1))
    before = rows(store)
    with pytest.raises(ConflictError):
        worker.commit(snapshot, commit, START_NS)
    assert rows(store) == before
    assert "act-1" in worker.snapshot(START_NS).action_versions, "the next tick ends it"


def test_a_commit_writes_the_columns_that_it_holds(store: Database) -> None:
    worker = job_worker(store, "first")
    snapshot = worker.snapshot(START_NS)
    detected = worker.detect(snapshot, worker.feed(snapshot), START_NS)
    decision = worker.decide(snapshot, detected, START_NS)
    commit = worker.prepare(snapshot, detected, decision, START_NS)
    assert worker.commit(snapshot, commit, START_NS).commanded
    with store.read() as session:
        written = load_snapshot(session, JOB, 0, 100, 1 << 20)
    assert written.columns == commit.columns
    assert written.columns.cursor == snapshot.log[-1].log_id


@pytest.mark.parametrize(("agent", "is_used"), [("node-0", True), ("node-1", False)])
def test_only_a_node_of_the_job_describes_it(store: Database, agent: str, is_used: bool) -> None:
    """Any user of any node can create a ring with the name of the job."""
    identity = Identity(
        job=JOB,
        generation=0,
        rank=0,
        local_rank=0,
        world_size=1,
        topology=ONE_RANK,
        coordinates=Coordinates(),
        pid=1,
        host="here",
        clock_offset_ns=0,
        started_ns=1,
        metadata={"schedule": "theirs"},
    )
    attached = RankAttached(time_ns=START_NS, identity=identity)
    batch = Batch(agent_id=agent, boot_id="b", sequence=0, packed_ns=START_NS, events=[attached])
    with store.write() as session:
        session.get_one(models.JobRow, JOB).state = "running"
        row = {"job_id": JOB, "rank": 0, "generation": 0, "agent_id": "node-0", "local_rank": 0}
        session.add(models.RankRow(**row, state="assigned", commanded=False))
        append(session, batch, encode(batch), START_NS)
    worker = job_worker(store, "first")
    fed = worker.feed(worker.snapshot(START_NS))
    assert (fed.metadata.get("schedule") == "theirs") == is_used


def test_what_is_written_regularly_does_not_wait_after_the_clock_was_set_back(
    store: Database,
) -> None:
    worker = job_worker(store, "first")
    assert worker.tick(START_NS).wrote
    assert worker.tick(START_NS).wrote
    assert not worker.tick(START_NS).wrote
    before_ns = START_NS - 3600 * SECOND
    snapshot = worker.snapshot(before_ns)
    detected = worker.detect(snapshot, worker.feed(snapshot), before_ns)
    decision = worker.decide(snapshot, detected, before_ns)
    commit = worker.prepare(snapshot, detected, decision, before_ns)
    assert commit.engine_memory is not None
    assert worker.commit(snapshot, commit, before_ns).wrote


def test_a_long_ledger_is_written_less_often(store: Database) -> None:
    worker = job_worker(store, "first")
    worker.tick(START_NS)
    written = []
    for now_ns, size in ((START_NS + SECOND, 1_000), (START_NS + 2 * SECOND, 4_000_000)):
        snapshot = worker.snapshot(now_ns)
        detected = worker.detect(snapshot, worker.feed(snapshot), now_ns)
        decision = worker.decide(snapshot, detected, now_ns)
        commit = worker.prepare(snapshot, detected, decision, now_ns)
        assert worker.commit(snapshot, replace(commit, engine_memory=bytes(size)), now_ns).wrote
        later = (
            worker.prepare(snapshot, detected, decision, now_ns + seconds * SECOND)
            for seconds in (4, 6, 39, 41)
        )
        written.append([each.engine_memory is not None for each in later])
    assert written == [[False, True, True, True], [False, False, False, True]]


def is_suspended(store: Database, progress: ActionProgress, *, has_begun: bool = False) -> bool:
    """Return whether detection is suspended at a phase of a restart of the job."""
    action = ActionView(
        action_id="act-1",
        kind="restart",
        state="running",
        reason="Rank 0 is hung.",
        generation=0,
        created_ns=START_NS,
        phases=[Phase(progress.phase or "", START_NS)],
        parameters=to_builtins(progress),
    )
    results = {(action.action_id, "restart"): LaunchResult(has_begun=has_begun)}
    with store.read() as session:
        snapshot = load_snapshot(session, JOB, 0, 100, 1 << 20)
    return is_ending_generation(replace(snapshot, actions=(action,), launch_results=results))


def test_detection_continues_until_something_ends_the_ranks(store: Database) -> None:
    assert not is_suspended(store, ActionProgress(phase="wait", planned=True, waits=True))
    assert is_suspended(store, ActionProgress(phase="checkpoint", planned=True))
    assert is_suspended(store, ActionProgress(phase="stop"))
    assert not is_suspended(store, ActionProgress(phase="launch"))
    assert not is_suspended(store, ActionProgress(phase="launch", planned=True, waits=True))
    assert is_suspended(store, ActionProgress(phase="launch", planned=True)), "ranks have stopped"
    assert is_suspended(store, ActionProgress(phase="launch"), has_begun=True)
