"""Live changes as server-sent events.

A change row names a resource; the event carries what the resource is when it is sent, so that a
client that lags gets the newest state once instead of every state in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from sqlalchemy.orm import Session

from paceline_server.api import problems, resources
from paceline_server.api.auth import still_authorized, viewer
from paceline_server.api.dependencies import Parts, PartsDep
from paceline_server.api.problems import not_found
from paceline_server.store import models, queries
from paceline_server.store.changes import changes_after, newest_change, oldest_change
from paceline_server.store.database import UNAVAILABLE

router = APIRouter(prefix="/events", tags=["events"])
_AT_ONCE = 1000
_EXAMPLE = 'id: 42\nevent: job\ndata: {"id": "job-1a2b3c4d", "state": "running"}\n\n'


@dataclass(frozen=True, slots=True)
class EventPage:
    """What one look at the changes found: events to send, and where to look from next."""

    position: int
    text: str


@router.get(
    "",
    dependencies=[viewer],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Events job, step, incident, action, node, ranks: `data` is the whole"
            " resource, or a list of ranks. A stream without `Last-Event-ID`, or"
            " with one too old, begins with everything that is open now.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **problems.responses(401, 403, 404, 503),
    },
)
def stream_events(
    request: Request,
    of: PartsDep,
    job: Annotated[str | None, Query(description="Only of this job, and nodes.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
) -> StreamingResponse:
    with of.database.read() as session:
        if job is not None and ("\0" in job or session.get(models.JobRow, job) is None):
            raise not_found("job", job)
        resume = _resume(session, last_event_id)
        first = _snapshot(session, of, job) if resume is None else EventPage(resume, "")
    return StreamingResponse(
        _events(request, of, job, first),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _resume(session: Session, last_event_id: str | None) -> int | None:
    """None: begin anew, for there is nothing to resume from."""
    if last_event_id is None or not (last_event_id.isascii() and last_event_id.isdigit()):
        return None
    position = int(last_event_id)
    known = oldest_change(session) - 1 <= position <= newest_change(session)
    return position if known else None


async def _events(
    request: Request, of: Parts, job: str | None, first: EventPage
) -> AsyncIterator[str]:
    subscription = of.wakes.changes.subscribe()
    of.metrics.streams.labels("events").inc()
    look: EventPage | None = first
    spoke_ns = 0
    try:
        while look is not None and await _goes_on(request, of):
            if look.text:
                yield look.text
                spoke_ns = of.now_ns()
            elif of.now_ns() - spoke_ns > of.heartbeat_seconds * 1e9:
                yield ": still here\n\n"
                spoke_ns = of.now_ns()
            await subscription.wait(of.stream_poll_seconds)
            look = await run_sync(_look, of, job, look.position)
    finally:
        of.metrics.streams.labels("events").dec()
        subscription.close()


async def _goes_on(request: Request, of: Parts) -> bool:
    return not of.wakes.changes.closed and await still_authorized(request, of, "viewer")


def _look(of: Parts, job: str | None, position: int) -> EventPage | None:
    """None: some of what came since is no longer kept; who comes back begins anew."""
    try:
        with of.database.read() as session:
            if position < oldest_change(session) - 1:
                return None
            changes = changes_after(session, position, job, _AT_ONCE)
            seen = changes[-1].id if len(changes) == _AT_ONCE else newest_change(session)
            newest = {(each.kind, each.subject, each.job_id): each.id for each in changes}
            parts = [
                _event(session, of, kind, subject, str(number))
                for (kind, subject, _), number in sorted(newest.items(), key=lambda item: item[1])
            ]
    except UNAVAILABLE:
        return EventPage(position, "")
    return EventPage(seen, "".join(parts))


def _snapshot(session: Session, of: Parts, job: str | None) -> EventPage:
    position = newest_change(session)
    wanted: list[tuple[str, str]] = []
    if job is None:
        wanted += [("job", row.id) for row in queries.jobs(session, 20, None)]
    else:
        wanted += [("job", job), ("ranks", job)]
    wanted += [("node", node.agent_id) for node in queries.nodes(session, 1000, None)]
    for state in ("open", "mitigating"):
        found = queries.incidents(session, 100, None, job, state)
        wanted += [("incident", incident.id) for incident in found]
    for state in ("proposed", "approved", "running"):
        wanted += [("action", each.id) for each in queries.actions(session, 100, None, job, state)]
    number = str(position)
    texts = [_event(session, of, kind, subject, number) for kind, subject in wanted]
    return EventPage(position, "".join(texts) or f"id: {number}\n: nothing yet\n\n")


def _event(session: Session, of: Parts, kind: str, subject: str, number: str) -> str:
    data = _data(session, of, kind, subject)
    return "" if data is None else f"id: {number}\nevent: {kind}\ndata: {data}\n\n"


def _data(session: Session, of: Parts, kind: str, subject: str) -> str | None:
    """JSON on one line. None: gone since."""
    found = _resource(session, of, kind, subject)
    if isinstance(found, list):
        return "[" + ",".join(each.model_dump_json() for each in found) + "]"
    return None if found is None else found.model_dump_json()


def _resource(
    session: Session, of: Parts, kind: str, subject: str
) -> BaseModel | list[BaseModel] | None:
    match kind:
        case "job":
            job = session.get(models.JobRow, subject)
            return None if job is None else resources.job(session, job)
        case "ranks":
            job = session.get(models.JobRow, subject)
            return None if job is None else [*resources.ranks(session, job).items]
        case "step":
            job_id, _, number = subject.partition("/")
            step = queries.step(session, job_id, int(number))
            return None if step is None else resources.step(step.summary)
        case "incident":
            incident = session.get(models.IncidentRow, subject)
            return None if incident is None else resources.incident(incident)
        case "action":
            action = session.get(models.ActionRow, subject)
            return None if action is None else resources.action(action)
        case _:
            node = session.get(models.NodeRow, subject)
            return (
                None
                if node is None
                else resources.node(session, node, of.now_ns(), of.policy.node_lease_seconds)
            )
