"""How much of the log a rebuild reads again."""

from __future__ import annotations

import pytest

from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_server.store.database import Database
from paceline_server.store.log import append
from paceline_server.store.models import EngineMemoryRow, GenerationRow
from paceline_server.worker.earlier_processes import EarlierProcesses
from paceline_server.worker.replay import rebuild
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
    job = toy_job("train", generation=2, cursor=ENTRIES)
    with database.write() as session:
        session.add(job)
        session.flush()
        for number in range(ENTRIES):
            batch = Batch(agent_id="a", boot_id="b", sequence=number, packed_ns=number * SECOND)
            append(session, batch, encode(batch), number * SECOND)
        for generation, cursor in ((1, 0), (2, FIRST_GENERATION)):
            placement = Placement(
                generation=generation,
                topology=job.topology,
                nodes={0: "a"},
                gpus={0: None},
                started_ns=cursor * SECOND,
            )
            session.add(
                GenerationRow(
                    job_id="train", generation=generation, cursor=cursor, placement=placement
                )
            )
        memory = Engine("train").memory()
        session.add(EngineMemoryRow(job_id="train", memory=memory, cursor=remembered))
    with database.read() as session:
        job = session.get_one(type(job), "train")
    processes = Counting(job, [], {})
    rebuild(database, job, processes, lambda: None)
    assert abs(processes.read - read) <= 1
