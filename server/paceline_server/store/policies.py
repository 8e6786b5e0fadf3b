"""Versions of policies: of the default for new jobs, and of jobs that have their own.

A version is kept with its hash, time and author, and never changed. Each job names the version that
it has, and each action the one that decided it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.types import AuditEntry
from paceline_server.policy import Policy, PolicyChange, policy_changes, policy_hash
from paceline_server.store import audit
from paceline_server.store.changes import record_change
from paceline_server.store.models import JobRow, PolicyVersionRow

_AT_START = "set at the start of the server"


def newest_version(session: Session, job_id: str | None = None) -> PolicyVersionRow | None:
    """Return the newest version of a job's own policy, or of the default for new jobs."""
    row = PolicyVersionRow
    query = select(row).where(row.job_id.is_(None) if job_id is None else row.job_id == job_id)
    return session.scalar(query.order_by(row.id.desc()).limit(1))


def versions(
    session: Session, limit: int, before: int | None, job_id: str | None
) -> Sequence[PolicyVersionRow]:
    """Return one page of versions, the newest first. `job_id` None: of the default."""
    row = PolicyVersionRow
    query = select(row).where(row.job_id.is_(None) if job_id is None else row.job_id == job_id)
    if before is not None:
        query = query.where(row.id < before)
    return session.scalars(query.order_by(row.id.desc()).limit(limit)).all()


def version_before(session: Session, row: PolicyVersionRow) -> PolicyVersionRow | None:
    """Return the version that this one replaced: for a job's first one, the default of that time.

    None: it replaced the built-in values.
    """
    table = PolicyVersionRow
    for job_id in dict.fromkeys((row.job_id, None)):
        scope = table.job_id.is_(None) if job_id is None else table.job_id == job_id
        query = select(table).where(scope, table.id < row.id)
        if (found := session.scalar(query.order_by(table.id.desc()).limit(1))) is not None:
            return found
    return None


def record_default(session: Session, policy: Policy, source: str, now_ns: int) -> None:
    """Record the policy for new jobs, unless it is the newest version already.

    `source`: where it is from, for the audit log.
    """
    before = newest_version(session)
    if before is not None and before.hash == policy_hash(policy):
        return
    row = _insert(session, None, policy, source, _AT_START, now_ns)
    changes = policy_changes(Policy() if before is None else before.policy, policy)
    detail = f"Version {row.id}. {changes_text(changes)}"
    entry = AuditEntry(
        actor=source, verb="changed the default policy", subject="policy", detail=detail
    )
    audit.record(session, None, entry, now_ns)


def assign(session: Session, job: JobRow, actor: str, now_ns: int) -> None:
    """Set the version of a new job: that of the default if it has no values of its own."""
    default = newest_version(session)
    if default is None or default.hash != policy_hash(job.policy):
        default = _insert(session, job.id, job.policy, actor, "", now_ns)
    job.policy_version = default.id


def change(
    session: Session, job: JobRow, policy: Policy, actor: str, comment: str, now_ns: int
) -> list[PolicyChange]:
    """Give a job another policy, and return what has changed; nothing if it is the same."""
    changes = policy_changes(job.policy, policy)
    if not changes:
        return []
    row = _insert(session, job.id, policy, actor, comment, now_ns)
    job.policy, job.policy_version = policy, row.id
    detail = f"Version {row.id}. {changes_text(changes)} {comment}".rstrip()
    entry = AuditEntry(actor=actor, verb="changed the policy", subject=job.id, detail=detail)
    audit.record(session, job.id, entry, now_ns)
    record_change(session, job.id, "job", job.id)
    return changes


def changes_text(changes: Sequence[PolicyChange]) -> str:
    """Return `mode: approve -> auto, approvers: none -> alice.`; a sentence if nothing changed."""
    if not changes:
        return "The built-in values."
    parts = (f"{one.field}: {value_text(one.before)} -> {value_text(one.after)}" for one in changes)
    return ", ".join(parts) + "."


def value_text(value: object) -> str:
    """Return a value of a field for people; lists without brackets."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _insert(
    session: Session, job_id: str | None, policy: Policy, actor: str, comment: str, now_ns: int
) -> PolicyVersionRow:
    row = PolicyVersionRow(
        job_id=job_id,
        hash=policy_hash(policy),
        at_ns=now_ns,
        actor=actor.replace("\0", ""),
        comment=comment.replace("\0", ""),
        policy=policy,
    )
    session.add(row)
    session.flush()  # for its id
    return row
