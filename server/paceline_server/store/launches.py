"""Requests to launchers as rows: committed with the action, carried out by the launch thread."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from paceline_server.decide.types import LaunchKind, LaunchRequest, LaunchResult
from paceline_server.store.database import insert_into
from paceline_server.store.models import ActionRow, LaunchRow

_TEXT = 1000  # characters of a detail


class WithdrawnError(Exception):
    """The request was withdrawn, or its action has ended: nothing may be done for it any more."""


def request(session: Session, job_id: str, intent: LaunchRequest, now_ns: int) -> None:
    """Store a request. An action has one of each kind: a repeated one changes nothing."""
    session.execute(
        insert_into(session, LaunchRow)
        .values(
            action_id=intent.action_id,
            kind=intent.kind,
            job_id=job_id,
            created_ns=now_ns,
            request=intent,
            result=LaunchResult(),
            next_ns=0,
            finished_ns=None,
        )
        .on_conflict_do_nothing(index_elements=["action_id", "kind"])
    )


def results(
    session: Session, action_ids: Sequence[str]
) -> dict[tuple[str, LaunchKind], LaunchResult]:
    """Return the results of the actions' requests so far."""
    if not action_ids:
        return {}
    rows = session.scalars(select(LaunchRow).where(LaunchRow.action_id.in_(action_ids)))
    return {(row.action_id, row.request.kind): row.result for row in rows}


def unfinished(session: Session) -> Sequence[LaunchRow]:
    """Return the requests that are not finished, oldest first."""
    return session.scalars(
        select(LaunchRow)
        .where(LaunchRow.finished_ns.is_(None))
        .order_by(LaunchRow.created_ns, LaunchRow.action_id, LaunchRow.kind)
    ).all()


def is_wanted(session: Session, action_id: str, kind: LaunchKind) -> bool:
    """Return whether the action still needs the request: an answer while people consider it, and
    a restart while it runs: the job may have finished by itself, or a person may have stopped it.
    """
    state = session.scalar(select(ActionRow.state).where(ActionRow.id == action_id))
    return state == "running" if kind == "restart" else state in ("proposed", "approved")


def record(
    session: Session,
    row: LaunchRow,
    result: LaunchResult,
    next_ns: int,
    finished_ns: int | None,
) -> bool:
    """Store what the launcher showed; return whether that is news. Raises WithdrawnError."""
    result = LaunchResult(
        state=result.state,
        detail=result.detail.replace("\0", "")[:_TEXT],
        has_begun=result.has_begun or row.result.has_begun,
        has_effect=result.has_effect or row.result.has_effect,
    )
    recorded = session.scalar(
        update(LaunchRow)
        .where(LaunchRow.action_id == row.action_id, LaunchRow.kind == row.kind)
        .where(LaunchRow.finished_ns.is_(None))
        .values(result=result, next_ns=next_ns, finished_ns=finished_ns)
        .returning(LaunchRow.action_id)
    )
    if recorded is None:
        raise WithdrawnError(row.action_id)
    return result != row.result


def withdraw(session: Session, action_id: str, now_ns: int) -> bool:
    """Finish a request for a restart, unless it has begun; return whether nothing was done for it.

    The launch thread cannot begin it meanwhile, because there is one writer at a time.
    """
    row = session.get(LaunchRow, (action_id, "restart"))
    if row is not None and (row.result.has_begun or row.finished_ns is not None):
        return False
    if row is not None:
        row.finished_ns = now_ns
    return True
