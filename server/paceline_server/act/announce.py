"""Write alerts into the outbox, in the transaction that commits what they report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec.structs import replace
from sqlalchemy import delete
from sqlalchemy.orm import Session

from paceline_server.decide.types import ActionView, IncidentView
from paceline_server.detect.kinds import Severity, severity_rank
from paceline_server.store.models import OutboxRow

IncidentEvent = Literal["opened", "updated", "resolved"]


class IncidentAlert(msgspec.Struct, frozen=True, kw_only=True, tag="incident"):
    """One change of an incident.

    `previous_severity`: as last announced, if it has changed. `is_correction`: it names another
    rank or node than before.
    """

    event: IncidentEvent
    job_id: str
    job_name: str
    incident: IncidentView
    previous_severity: str | None = None
    is_correction: bool = False
    lag_seconds: float | None = None  # how far the analysis was behind; None: of no analysis


class ActionNotice(msgspec.Struct, frozen=True, kw_only=True, tag="action"):
    job_id: str
    job_name: str
    action: ActionView
    lag_seconds: float | None = None


Notice = IncidentAlert | ActionNotice


@dataclass(frozen=True, slots=True)
class IncidentReceiver:
    """A receiver that gets incidents of a minimum severity; `name` as in outbox rows."""

    name: str
    minimum_severity: Severity = "warning"


def incident_alerts(
    job_id: str,
    job_name: str,
    before: IncidentView | None,
    after: IncidentView,
    minimum: Severity = "warning",
) -> Iterator[IncidentAlert]:
    """Yield the alerts of one change; two for an incident that is opened and resolved at once.

    For a receiver an incident is opened when it reaches the minimum severity, and resolved when it
    no longer does.
    """
    if before is not None and not _reaches(before, minimum):
        before = None
    if before is None and not _reaches(after, minimum):
        return
    if before is not None and after.state != "resolved" and not _reaches(after, minimum):
        over = replace(before, state="resolved")
        yield IncidentAlert(event="resolved", job_id=job_id, job_name=job_name, incident=over)
        return
    if before is None and after.state == "resolved":
        opened = replace(after, state="open", resolved_ns=None)
        yield from incident_alerts(job_id, job_name, None, opened, minimum)
        before = opened
    alert = incident_alert(job_id, job_name, before, after)
    if alert is not None:
        yield alert


def incident_alert(
    job_id: str, job_name: str, before: IncidentView | None, after: IncidentView
) -> IncidentAlert | None:
    """Return the alert; None if nothing changed that receivers should get."""
    if before is None:
        event: IncidentEvent = "opened"
    elif after.state == "resolved" and before.state != "resolved":
        event = "resolved"
    elif _alerted(before) != _alerted(after):
        event = "updated"
    else:
        return None
    previous = None if before is None else before.finding.severity
    named = None if before is None else (before.finding.rank, before.finding.node)
    return IncidentAlert(
        event=event,
        job_id=job_id,
        job_name=job_name,
        incident=after,
        previous_severity=previous if previous != after.finding.severity else None,
        is_correction=named not in (None, (after.finding.rank, after.finding.node)),
    )


def _reaches(incident: IncidentView, minimum: Severity) -> bool:
    return severity_rank(incident.finding.severity) >= severity_rank(minimum)


def _alerted(incident: IncidentView) -> tuple[object, ...]:
    """Return the properties whose change causes a new alert."""
    finding = incident.finding
    return incident.state, finding.severity, finding.cause, finding.rank, finding.node


def announce(
    session: Session, receivers: Iterable[str], notice: Notice, subject: str, now_ns: int
) -> None:
    """Write one row for each receiver."""
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
    """Delete alerts created before `before_ns`, delivered or not: a receiver may be gone."""
    session.execute(delete(OutboxRow).where(OutboxRow.created_ns < before_ns))
