"""Times of finished recoveries: recorded when a restart is done, never pruned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.recovery import RecoveryTimes, recovery_of
from paceline_server.decide.types import ActionView, IncidentView
from paceline_server.store.models import ActionRow, IncidentRow, RecoveryRow

PACELINE = "paceline"  # launcher of jobs that the agents started


def of_incidents(session: Session, incidents: Iterable[IncidentView]) -> dict[str, RecoveryTimes]:
    """Return the recoveries, also those in progress, by incident."""
    wanted = [one for one in incidents if one.action_ids]
    ids = {action_id for one in wanted for action_id in one.action_ids}
    if not ids:
        return {}
    views = session.scalars(select(ActionRow.view).where(ActionRow.id.in_(ids)))
    actions = {view.action_id: view for view in views}
    found = {}
    for one in wanted:
        own = [actions[action_id] for action_id in one.action_ids if action_id in actions]
        recovery = recovery_of(one, own)
        if recovery is not None:
            found[one.incident_id] = recovery
    return found


def record(
    session: Session, job_id: str, actions: Iterable[ActionView], launcher: str | None
) -> None:
    """Record the recoveries that these actions have completed; a repeated call changes nothing.

    A restart that was done for several incidents counts once, for the one that it was begun for.
    """
    for action in actions:
        if action.kind != "restart" or action.state != "done" or action.incident_id is None:
            continue
        row = session.get(IncidentRow, action.incident_id)
        if row is None:
            continue
        recovery = of_incidents(session, [row.view]).get(row.id)
        if recovery is None or action.finished_ns is None:
            continue
        session.merge(
            RecoveryRow(
                incident_id=row.id,
                job_id=job_id,
                kind=row.kind,
                launcher=launcher or PACELINE,
                resumed_ns=action.finished_ns,
                lost_steps=action.lost_steps,
                **msgspec.structs.asdict(recovery),
            )
        )


def since(
    session: Session, since_ns: int, limit: int, job_id: str | None = None
) -> Sequence[RecoveryRow]:
    """Return the recoveries that ended since then, the newest first."""
    row = RecoveryRow
    query = select(row).where(row.resumed_ns >= since_ns)
    if job_id is not None:
        query = query.where(row.job_id == job_id)
    return session.scalars(query.order_by(row.resumed_ns.desc()).limit(limit)).all()
