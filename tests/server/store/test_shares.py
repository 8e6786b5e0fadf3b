"""Step summaries are stored longer than values per rank; both are read back unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from paceline_server.steps.types import RankStep, StepSummary
from paceline_server.store import models, queries
from paceline_server.store.database import Database
from paceline_server.store.shares import insert_steps, medians, newest_shares, prune_steps
from paceline_wire.topology import Topology
from tests.server.rows import toy_job

JOB = "job-1"
RANKS = 1024


@pytest.fixture
def job(database: Database) -> Database:
    with database.write() as session:
        session.add(toy_job(JOB, topology=Topology(RANKS, 1, 1), state="running", created_ns=0))
    return database


def summary(step: int, generation: int = 1) -> StepSummary:
    ranks = [
        RankStep(rank, 1.0, 0.5 + rank, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0, 1.25 + step)
        for rank in range(RANKS - 1)  # the last rank reported nothing
    ]
    ranks[7] = RankStep(7, 1.0, 9.0, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0, None)
    return StepSummary(
        generation=generation,
        step=step,
        started_ns=step,
        duration_seconds=1.0,
        ranks=ranks,
        slowest_rank=3,
    )


def test_per_rank_values_are_read_back_as_arrays(job: Database) -> None:
    with job.write() as session:
        insert_steps(session, JOB, [summary(step) for step in range(3)])
        insert_steps(session, JOB, [summary(1)])  # the same step again
        insert_steps(session, JOB, [])
        insert_steps(session, JOB, [summary(0, generation=0)])
    with job.read() as session:
        shares = newest_shares(session, JOB, 1, RANKS, 2)
        assert shares.steps == [1, 2]
        slowdown, self_seconds = medians(shares.slowdown), medians(shares.self_seconds)
        assert (slowdown[0], slowdown[7], slowdown[RANKS - 1]) == (2.75, None, None)
        assert (self_seconds[2], self_seconds[7], self_seconds[RANKS - 1]) == (2.5, 9.0, None)
        [newest] = queries.steps(session, JOB, None, 1)
        assert newest.summary.ranks == []
        assert newest.summary.slowest_slowdown == 3.25
        assert newest.summary.means is not None
        assert newest.summary.means.compute_seconds == pytest.approx(0.4)


def test_ranks_beyond_a_smaller_topology_are_dropped(job: Database) -> None:
    with job.write() as session:
        insert_steps(session, JOB, [summary(0)])
    with job.read() as session:
        assert newest_shares(session, JOB, 1, 4, 5).slowdown.shape == (1, 4)
        assert medians(newest_shares(session, JOB, 9, 4, 5).slowdown) == [None] * 4


def test_per_rank_values_are_pruned_before_summaries(job: Database) -> None:
    with job.write() as session:
        insert_steps(session, JOB, [summary(step) for step in range(30)])
        prune_steps(session, JOB, kept=20, shares_kept=5)
        prune_steps(session, "no such job", kept=20, shares_kept=5)
        kept = {
            table: session.execute(select(func.min(table.step), func.count())).one()
            for table in (models.StepRow, models.StepSharesRow)
        }
    assert kept == {models.StepRow: (10, 20), models.StepSharesRow: (25, 5)}


def test_a_run_that_goes_back_keeps_its_newest_steps(job: Database) -> None:
    def kept(session: Session, table: Any) -> list[Any]:
        steps = table.generation, func.min(table.step), func.max(table.step)
        by_generation = select(*steps).group_by(table.generation).order_by(table.generation)
        return list(session.execute(by_generation).all())

    with job.write() as session:
        insert_steps(session, JOB, [summary(step) for step in range(30)])
        prune_steps(session, JOB, kept=20, shares_kept=5)
        session.get_one(models.JobRow, JOB).generation = 2
        session.flush()
        prune_steps(session, JOB, kept=20, shares_kept=5)
        insert_steps(session, JOB, [summary(step, generation=2) for step in range(3, 8)])
        prune_steps(session, JOB, kept=20, shares_kept=5)
        assert kept(session, models.StepRow) == [(1, 10, 29), (2, 3, 7)]
        assert kept(session, models.StepSharesRow) == [(1, 25, 29), (2, 3, 7)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_free_pages_are_returned_to_the_file_system(job: Database) -> None:
    def pages() -> int:
        with job.read() as session:
            return int(session.scalar(text("PRAGMA page_count")) or 0)

    with job.write() as session:
        insert_steps(session, JOB, [summary(step) for step in range(100)])
    full = pages()
    with job.write() as session:
        prune_steps(session, JOB, kept=1, shares_kept=1)
    job.reclaim_space()
    assert pages() < full / 2
