"""Change rows for event streams: which resource changed, in commit order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sqlalchemy import Table, delete, func, insert, or_, select
from sqlalchemy.orm import Session

from paceline_server.store.models import ChangeRow

_TABLE: Table = ChangeRow.__table__  # type: ignore[assignment]  # is a Table
Kind = Literal["job", "step", "incident", "action", "node", "ranks"]


def record_change(session: Session, job_id: str | None, kind: Kind, subject: str) -> None:
    """Announce that a resource changed. `job_id` None: every stream receives it."""
    session.execute(insert(ChangeRow).values(job_id=job_id, kind=kind, subject=subject))


def record_changes(
    session: Session, job_id: str | None, kind: Kind, subjects: Sequence[str]
) -> None:
    """Announce many resources of one kind with one statement."""
    if subjects:
        rows = [{"job_id": job_id, "kind": kind, "subject": subject} for subject in subjects]
        # The core table avoids ORM objects: there are many rows, and they are not used again here.
        session.connection().execute(insert(_TABLE), rows)


def newest_change(session: Session) -> int:
    """Return the id of the newest change, 0 if there is none."""
    return session.scalar(select(func.max(ChangeRow.id))) or 0


def oldest_change(session: Session) -> int:
    """Return the id of the oldest stored change, 0 if there is none."""
    return session.scalar(select(func.min(ChangeRow.id))) or 0


def changes_after(
    session: Session, position: int, job_id: str | None, limit: int = 1000
) -> list[ChangeRow]:
    """Return changes in order. With `job_id`: those of that job and those without a job."""
    query = select(ChangeRow).where(ChangeRow.id > position).order_by(ChangeRow.id).limit(limit)
    if job_id is not None:
        query = query.where(or_(ChangeRow.job_id == job_id, ChangeRow.job_id.is_(None)))
    return list(session.scalars(query))


def prune_changes(session: Session, kept: int) -> None:
    """Delete all but the newest `kept` changes."""
    session.execute(delete(ChangeRow).where(ChangeRow.id <= newest_change(session) - kept))
