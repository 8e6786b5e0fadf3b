"""Puts what the outside shall hear into the outbox, in the transaction that makes it true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from sqlalchemy import delete
from sqlalchemy.orm import Session

from paceline_server.decide.types import ActionView, IncidentView
from paceline_server.store.models import OutboxRow

IncidentEvent = Literal["opened", "updated", "resolved"]


class IncidentAlert(msgspec.Struct, frozen=True, kw_only=True, tag="incident"):
    """`previous_severity`: what it was when last announced, if that has changed."""

    event: IncidentEvent
    job_id: str
    job_name: str
    incident: IncidentView
    previous_severity: str | None = None


class ActionNotice(msgspec.Struct, frozen=True, kw_only=True, tag="action"):
    job_id: str
    job_name: str
    action: ActionView


Notice = IncidentAlert | ActionNotice


def incident_alert(
    job_id: str, job_name: str, before: IncidentView | None, after: IncidentView
) -> IncidentAlert | None:
    """None if nothing changed that people outside would want to hear."""
    if before is None:
        event: IncidentEvent = "opened"
    elif after.state == "resolved" and before.state != "resolved":
        event = "resolved"
    elif _told(before) != _told(after):
        event = "updated"
    else:
        return None
    was = None if before is None else before.finding.severity
    return IncidentAlert(
        event=event,
        job_id=job_id,
        job_name=job_name,
        incident=after,
        previous_severity=was if was != after.finding.severity else None,
    )


def _told(incident: IncidentView) -> tuple[object, ...]:
    finding = incident.finding
    return incident.state, finding.severity, finding.cause, finding.rank, finding.node


def announce(
    session: Session, receivers: Iterable[str], notice: Notice, subject: str, now_ns: int
) -> None:
    """One row for each receiver."""
    event = notice.event if isinstance(notice, IncidentAlert) else notice.action.state
    body = msgspec.json.encode(notice).decode()
    for receiver in receivers:
        session.add(
            OutboxRow(
                receiver=receiver,
                subject=subject,
                event=event,
                body=body,
                created_ns=now_ns,
                attempts=0,
                next_attempt_ns=now_ns,
            )
        )


def prune_outbox(session: Session, before_ns: int) -> None:
    """Forget what was to be told by then, delivered or not: its receiver may be there no more."""
    session.execute(delete(OutboxRow).where(OutboxRow.created_ns < before_ns))
