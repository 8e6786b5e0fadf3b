"""Retention of what an ended job leaves: its steps and the evidence of its ranks.

The job, its incidents, actions and recoveries, and its ledger stay.
"""

from __future__ import annotations

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from paceline_server.store.log import FINISHED
from paceline_server.store.models import (
    EngineMemoryRow,
    JobRow,
    KeptLogRow,
    RankEvidenceRow,
    StepRow,
    StepSharesRow,
)

_DETAILS = (StepRow, StepSharesRow, RankEvidenceRow, EngineMemoryRow, KeptLogRow)


def drop_details(session: Session, ended_before_ns: int, most: int) -> bool:
    """Delete up to `most` steps of one job that ended before, and with its last steps the rest.

    Returns whether there may be more to delete.
    """
    has_details = or_(
        *(select(table.job_id).where(table.job_id == JobRow.id).exists() for table in _DETAILS)
    )
    job_id = session.scalar(
        select(JobRow.id)
        .where(JobRow.state.in_(FINISHED), JobRow.finished_ns < ended_before_ns, has_details)
        .limit(1)
    )
    if job_id is None:
        return False
    oldest = (
        select(StepRow.step)
        .where(StepRow.job_id == job_id)
        .order_by(StepRow.step)
        .limit(most)
        .subquery()
    )
    count, until = session.execute(select(func.count(), func.max(oldest.c.step))).one()
    if count == most:
        for table in (StepRow, StepSharesRow):
            session.execute(delete(table).where(table.job_id == job_id, table.step <= until))
        return True
    for detail in _DETAILS:
        session.execute(delete(detail).where(detail.job_id == job_id))
    return True
