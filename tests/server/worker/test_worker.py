"""The worker's loop: which jobs it works on, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline_server.decide.types import RankView
from paceline_server.metrics import BackgroundMetrics
from paceline_server.policy import Policy
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.leases import acquire, lease_name, release, seize
from paceline_server.store.log import append
from paceline_server.store.models import EngineMemoryRow, HotLogRow
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.commit import AlertTargets
from paceline_server.worker.ranks import new_rank_rows
from paceline_server.worker.tick import JobWorker, TickSettings
from paceline_server.worker.worker import Worker
from paceline_wire.batch import Batch
from tests.server.rows import toy_job

SECOND = 1_000_000_000
HOUR = 3600 * SECOND
JOB = "job-1"
SETTINGS = TickSettings(
    lease_ns=SECOND // 4, batches=100, batch_bytes=1 << 20, alert_targets=AlertTargets((), ())
)


class Clock:
    """The server's CLOCK_REALTIME."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(database: Database, clock: Clock) -> Worker:
    """A worker whose thread is not started, and a running job."""
    with database.write() as session:
        session.add(toy_job(JOB, state="running"))
        session.flush()
        rank = RankView(rank=0, agent_id="node-0", local_rank=0, gpu=None, state="attached")
        session.add_all(new_rank_rows(JOB, 1, [rank]))
    metrics = BackgroundMetrics(CollectorRegistry())
    return Worker(database, CommitSignals(), metrics, "me", SETTINGS, Settings(), Policy(), clock)


def test_a_job_whose_tick_failed_is_continued_though_the_clock_was_set_back(
    worker: Worker, database: Database, clock: Clock, wait_for: Callable[..., Any]
) -> None:
    memory = EngineMemoryRow(job_id=JOB, memory=b"malformed", cursor=0)
    with database.write() as session:
        session.add(memory)
    worker.run_pass()
    assert JOB not in worker._jobs
    with database.write() as session:
        session.delete(memory)
    clock.now_ns -= HOUR
    wait_for(lambda: worker.run_pass() or JOB in worker._jobs, "the job")


def test_a_job_whose_tick_always_fails_keeps_the_log_as_long_as_its_age_limit(
    worker: Worker, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the log grows until the disk is full, and no job has any batches."""

    def fail(job: JobWorker, now_ns: int) -> None:
        raise ValueError("of every tick")

    monkeypatch.setattr(JobWorker, "tick", fail)
    with database.write() as session:
        batch = Batch(agent_id="node-0", boot_id="boot", sequence=0, packed_ns=clock())
        append(session, batch, b"", clock())
    for seconds in range(0, 960, 30):
        with database.read() as session:
            assert session.get(HotLogRow, 1) is not None, f"after {seconds} s"
        worker._not_before.clear()
        worker.run_pass()
        clock.now_ns += 30 * SECOND
    worker.run_pass()
    with database.read() as session:
        assert session.get(HotLogRow, 1) is None


def test_a_job_that_another_server_had_meanwhile_begins_with_a_warm_up(
    worker: Worker, database: Database, clock: Clock
) -> None:
    """After a pause every node seems silent."""
    name = lease_name(JOB)
    worker.run_pass()
    with database.write() as session:  # its next generation was found
        seize(session, name)
    worker._forget(JOB)
    with database.write() as session:
        epoch = acquire(session, name, "other", clock(), HOUR // 10)
    worker.run_pass()
    assert JOB not in worker._jobs
    assert epoch is not None
    with database.write() as session:
        release(session, name, "other", epoch)
    worker.run_pass()
    assert not worker._jobs[JOB]._memory.warm_up.is_done({"node-0"}, clock())
