"""Storage of finished steps: a summary with long retention, and each rank's values with short
retention.

A summary takes a few hundred bytes for any number of ranks. The per-rank values grow with the
world size, are read for the newest steps only, and are stored as packed arrays, which are cheap to
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from paceline_server.steps.types import RankStep, StepMeans, StepSummary
from paceline_server.store.database import insert_into
from paceline_server.store.models import Base, JobRow, StepRow, StepSharesRow

_RANK, _SECONDS = np.dtype("<i4"), np.dtype("<f8")


@dataclass(frozen=True)
class Shares:
    """Per-rank values of steps: arrays of shape [step, rank].

    NaN where a rank did not take part or has no peers."""

    steps: list[int]
    self_seconds: npt.NDArray[np.float64]
    slowdown: npt.NDArray[np.float64]


def insert_steps(session: Session, job_id: str, summaries: Sequence[StepSummary]) -> None:
    """Insert finished steps. A step that is already stored is not changed."""
    if not summaries:
        return
    rows = [step_rows(job_id, summary) for summary in summaries]
    for table in (StepRow, StepSharesRow):
        statement = insert_into(session, table).on_conflict_do_nothing()
        session.connection().execute(statement, [row[table] for row in rows])


def step_rows(job_id: str, summary: StepSummary) -> dict[type[Base], dict[str, object]]:
    """Return the rows of one step by table."""
    key = {"job_id": job_id, "step": summary.step, "generation": summary.generation}
    columns = {
        "rank": _column(summary, lambda share: share.rank, _RANK),
        "self_seconds": _column(summary, lambda share: share.self_seconds, _SECONDS),
        "slowdown": _column(summary, lambda share: share.slowdown, _SECONDS),
    }
    return {StepRow: {**key, "summary": without_ranks(summary)}, StepSharesRow: {**key, **columns}}


def _column(
    summary: StepSummary, value: Callable[[RankStep], float | None], kind: np.dtype[np.generic]
) -> bytes:
    return np.array([value(share) for share in summary.ranks], dtype=kind).tobytes()


def without_ranks(summary: StepSummary) -> StepSummary:
    """Return the summary with means and the slowest rank's slowdown instead of all ranks."""
    if not summary.ranks:
        return summary
    slow = (share.slowdown for share in summary.ranks if share.rank == summary.slowest_rank)
    return replace(
        summary,
        ranks=[],
        means=StepMeans(
            *(
                fmean([getattr(share, name) for share in summary.ranks])
                for name in StepMeans.__struct_fields__
            )
        ),
        slowest_slowdown=next(slow, None),
    )


def newest_shares(
    session: Session, job_id: str, generation: int, world_size: int, most: int
) -> Shares:
    """Return up to `most` of the newest stored steps of one generation, oldest first."""
    query = (
        select(StepSharesRow)
        .where(StepSharesRow.job_id == job_id, StepSharesRow.generation == generation)
        .order_by(StepSharesRow.step.desc())
        .limit(most)
    )
    rows = session.scalars(query).all()[::-1]
    return Shares(
        steps=[row.step for row in rows],
        self_seconds=_table(rows, [row.self_seconds for row in rows], world_size),
        slowdown=_table(rows, [row.slowdown for row in rows], world_size),
    )


def _table(
    rows: Sequence[StepSharesRow], columns: Sequence[bytes], world_size: int
) -> npt.NDArray[np.float64]:
    table = np.full((len(rows), world_size), np.nan)
    for number, (row, column) in enumerate(zip(rows, columns, strict=True)):
        ranks = np.frombuffer(row.rank, _RANK)
        is_valid = ranks < world_size
        table[number, ranks[is_valid]] = np.frombuffer(column, _SECONDS)[is_valid]
    return table


def medians(table: npt.NDArray[np.float64]) -> list[float | None]:
    """Return the median of each column; None for a column of NaN."""
    result: list[float | None] = [None] * table.shape[1]
    columns = np.flatnonzero(np.isfinite(table).any(axis=0))
    if columns.size:
        values = np.nanmedian(table[:, columns], axis=0)
        for column, value in zip(columns.tolist(), values.tolist(), strict=True):
            result[column] = value
    return result


def prune_steps(session: Session, job_id: str, kept: int, shares_kept: int) -> None:
    """Delete all but a job's newest steps and per-rank values.

    Those of the current generation are the newest, also if an earlier one had reached later steps.
    """
    current = select(JobRow.generation).where(JobRow.id == job_id).scalar_subquery()
    of_current = StepRow.job_id == job_id, StepRow.generation == current
    newest = session.scalar(select(func.max(StepRow.step)).where(*of_current))
    if newest is not None:
        for table, most in ((StepRow, kept), (StepSharesRow, shares_kept)):
            old = table.job_id == job_id, table.step <= newest - most
            session.execute(delete(table).where(*old))
