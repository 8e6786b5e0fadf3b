"""The audit log: who did what to which resource. It is never pruned."""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.decide.types import AuditEntry
from paceline_server.store.models import AuditRow


def record(session: Session, job_id: str | None, entry: AuditEntry, now_ns: int) -> None:
    """Append one entry. `job_id` is None for entries that belong to no job."""
    session.add(
        AuditRow(
            at_ns=now_ns,
            job_id=job_id,
            actor=_text(entry.actor),
            verb=_text(entry.verb),
            subject=_text(entry.subject),
            detail=_text(entry.detail),
        )
    )


def _text(value: str) -> str:
    return value.replace("\0", "")  # the one character that PostgreSQL text cannot hold
