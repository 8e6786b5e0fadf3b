"""How much of the log a rebuild reads again."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_server.store.database import Database
from paceline_server.store.log import append
from paceline_server.store.models import EngineMemoryRow, GenerationRow, JobRow
from paceline_server.worker.earlier_processes import EarlierProcesses
from paceline_server.worker.replay import Rebuilt, rebuild
from paceline_wire.batch import Batch, encode
from tests.server.rows import toy_job

SECOND = 1_000_000_000
ENTRIES, FIRST_GENERATION = 600, 500  # one entry per second


class Counting(EarlierProcesses):
    """Counts the batches that are read."""

    read = 0

    def filter(self, batch: Batch) -> Batch:
        self.read += 1
        return batch


@pytest.mark.parametrize(
    ("remembered", "read"),
    [
        pytest.param(0, ENTRIES, id="unknown"),
        pytest.param(495, 100 + 5 + 60, id="end of the first generation"),
        pytest.param(590, 100, id="second generation"),
    ],
)
def test_only_the_end_of_the_generation_before_is_read_again(
    database: Database, remembered: int, read: int
) -> None:
    with database.write() as session:
        _add_job(session, cursor=ENTRIES, generation_cursors=(0, FIRST_GENERATION))
        memory = Engine("train").memory()
        session.add(EngineMemoryRow(job_id="train", memory=memory, cursor=remembered))
    processes, _ = _rebuild(database)
    assert abs(processes.read - read) <= 1


@pytest.mark.parametrize("cursor", [500, ENTRIES])
def test_the_run_before_may_begin_after_the_cursor_of_the_current_one(
    database: Database, cursor: int
) -> None:
    """It lasted less than the margin from which an external run is read."""
    with database.write() as session:
        _add_job(session, cursor=cursor, generation_cursors=(510, 500))
    _, rebuilt = _rebuild(database)
    placement = rebuilt.engine.tick(ENTRIES * SECOND).placement
    assert placement is not None
    assert placement.generation == 2


def _add_job(session: Session, cursor: int, generation_cursors: tuple[int, int]) -> None:
    """Add a job, its log and its generations 1 and 2."""
    job = toy_job("train", generation=2, cursor=cursor)
    session.add(job)
    session.flush()
    for number in range(ENTRIES):
        batch = Batch(agent_id="a", boot_id="b", sequence=number, packed_ns=number * SECOND)
        append(session, batch, encode(batch), number * SECOND)
    for generation, first in enumerate(generation_cursors, start=1):
        placement = Placement(
            generation=generation,
            topology=job.topology,
            nodes={0: "a"},
            gpus={0: None},
            started_ns=first * SECOND,
        )
        session.add(
            GenerationRow(job_id="train", generation=generation, cursor=first, placement=placement)
        )


def _rebuild(database: Database) -> tuple[Counting, Rebuilt]:
    with database.read() as session:
        job = session.get_one(JobRow, "train")
    processes = Counting(job, [], {})
    return processes, rebuild(database, job, processes, lambda: None)
