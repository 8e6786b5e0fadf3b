"""State of one job that a worker keeps between ticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome
from paceline_server.store import models, queries
from paceline_server.store.database import Database
from paceline_server.worker.earlier_processes import EarlierProcesses
from paceline_server.worker.ranks import RankRows
from paceline_server.worker.replay import rebuild
from paceline_server.worker.warm_up import WarmUp

_GRACE_NS = 1_000_000_000  # added to the node lease


@dataclass(slots=True)
class JobMemory:
    """The memory of one job.

    Dropped if a commit fails, because a tick changes it before the commit.

    The next owner of the job, or the same one, rebuilds it from the log.
    """

    engine: Engine
    ranks: RankRows
    earlier_processes: EarlierProcesses
    warm_up: WarmUp
    cursor: int  # id of the last log entry that was fed to the engine
    evaluation_loss: float | None
    rebuilt: Outcome  # steps and findings of the rebuild that are not stored yet


def load_memory(
    database: Database,
    job_id: str,
    clock: Callable[[], int],
    keep_alive: Callable[[], None],
) -> JobMemory:
    """Rebuild the engine from the log; `keep_alive` is called meanwhile to renew the lease."""
    with database.read() as session:
        job = session.get_one(models.JobRow, job_id)
        rows = queries.ranks(session, job_id)
        reported_generations = queries.reported_generations(session, job)
    earlier_processes = EarlierProcesses(job, rows, reported_generations)
    rebuilt = rebuild(database, job, earlier_processes, keep_alive)
    return JobMemory(
        engine=rebuilt.engine,
        ranks=RankRows(job.generation, rows, reported_generations),
        earlier_processes=earlier_processes,
        warm_up=WarmUp(clock(), int(job.policy.node_lease_seconds * 1e9) + _GRACE_NS),
        cursor=job.cursor,
        evaluation_loss=job.evaluation_loss,
        rebuilt=Outcome(steps=rebuilt.steps, findings=list(rebuilt.findings.values())),
    )
