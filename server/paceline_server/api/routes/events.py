"""Live changes as server-sent events.

A change row names a resource. The event carries the resource's state at the time of sending, so a
client that lags receives the newest state once instead of every intermediate state.
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
_STREAM_START = "Paceline-Stream-Start"
_CHANGES_PER_PAGE = 1000
_EXAMPLE = 'id: 42\nevent: job\ndata: {"id": "job-1a2b3c4d", "state": "running"}\n\n'


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events to send, and the position of the last change that they include."""

    position: int
    text: str


@router.get(
    "",
    dependencies=[viewer],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Events job, step, incident, action, node, ranks: `data` is the whole"
            " resource, or a list of ranks. A stream without `Last-Event-ID`, or with one that is"
            " too old, starts with a snapshot: jobs, nodes, open incidents and open actions.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        **problems.responses(401, 403, 404, 503),
    },
)
def stream_events(
    request: Request,
    parts: PartsDep,
    job: Annotated[str | None, Query(description="Only events of this job and of nodes.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
) -> StreamingResponse:
    with parts.database.read() as session:
        if job is not None and ("\0" in job or session.get(models.JobRow, job) is None):
            raise not_found("job", job)
        resume = _resume(session, last_event_id)
        first = _snapshot(session, parts, job) if resume is None else EventPage(resume, "")
    return StreamingResponse(
        _events(request, parts, job, first),
        media_type="text/event-stream",
        headers={
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
            # A snapshot lacks what ended in the meantime, so a client that resumes must know.
            _STREAM_START: "snapshot" if resume is None else "resumed",
        },
    )


def _resume(session: Session, last_event_id: str | None) -> int | None:
    """Return the position to resume from; None if the stream must start with a snapshot."""
    if last_event_id is None or not (last_event_id.isascii() and last_event_id.isdigit()):
        return None
    position = int(last_event_id)
    is_stored = oldest_change(session) - 1 <= position <= newest_change(session)
    return position if is_stored else None


async def _events(
    request: Request, parts: Parts, job: str | None, first: EventPage
) -> AsyncIterator[str]:
    subscription = parts.signals.changes.subscribe()
    parts.metrics.streams.labels("events").inc()
    page: EventPage | None = first
    last_sent_ns = 0
    try:
        while page is not None and await _continues(request, parts):
            if page.text:
                yield page.text
                last_sent_ns = parts.now_ns()
            elif parts.now_ns() - last_sent_ns > parts.heartbeat_seconds * 1e9:
                yield ": heartbeat\n\n"
                last_sent_ns = parts.now_ns()
            await subscription.wait(parts.stream_poll_seconds)
            page = await run_sync(_next_page, parts, job, page.position)
    finally:
        parts.metrics.streams.labels("events").dec()
        subscription.close()


async def _continues(request: Request, parts: Parts) -> bool:
    return not parts.signals.changes.closed and await still_authorized(request, parts, "viewer")


def _next_page(parts: Parts, job: str | None, position: int) -> EventPage | None:
    """Return the changes after `position`.

    None: some of them are no longer stored. The stream then ends and the client reconnects.
    """
    try:
        with parts.database.read() as session:
            if position < oldest_change(session) - 1:
                return None
            changes = changes_after(session, position, job, _CHANGES_PER_PAGE)
            is_full = len(changes) == _CHANGES_PER_PAGE
            last_id = changes[-1].id if is_full else newest_change(session)
            newest = {(change.kind, change.subject, change.job_id): change.id for change in changes}
            events = [
                _event(session, parts, kind, subject, str(number))
                for (kind, subject, _), number in sorted(newest.items(), key=lambda item: item[1])
            ]
    except UNAVAILABLE:
        return EventPage(position, "")
    return EventPage(last_id, "".join(events))


def _snapshot(session: Session, parts: Parts, job: str | None) -> EventPage:
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
    texts = [_event(session, parts, kind, subject, number) for kind, subject in wanted]
    return EventPage(position, "".join(texts) or f"id: {number}\n: no resources\n\n")


def _event(session: Session, parts: Parts, kind: str, subject: str, number: str) -> str:
    data = _data(session, parts, kind, subject)
    return "" if data is None else f"id: {number}\nevent: {kind}\ndata: {data}\n\n"


def _data(session: Session, parts: Parts, kind: str, subject: str) -> str | None:
    """Return the resource as one line of JSON; None if it no longer exists."""
    found = _resource(session, parts, kind, subject)
    if isinstance(found, list):
        return "[" + ",".join(each.model_dump_json() for each in found) + "]"
    return None if found is None else found.model_dump_json()


def _resource(
    session: Session, parts: Parts, kind: str, subject: str
) -> BaseModel | list[BaseModel] | None:
    match kind:
        case "job":
            job = session.get(models.JobRow, subject)
            return None if job is None else resources.job(session, job, parts.as_of())
        case "ranks":
            job = session.get(models.JobRow, subject)
            return None if job is None else [*resources.ranks(session, job, parts.as_of()).items]
        case "step":
            job_id, _, number = subject.partition("/")
            step = queries.step(session, job_id, int(number))
            return None if step is None else resources.step(step.summary)
        case "incident":
            incident = session.get(models.IncidentRow, subject)
            return None if incident is None else resources.incident(session, incident)
        case "action":
            action = session.get(models.ActionRow, subject)
            return None if action is None else resources.action(action)
        case _:
            node = session.get(models.NodeRow, subject)
            return None if node is None else resources.node(session, node, parts.as_of())
