"""Nodes: one per agent."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy.orm import Session

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import Operator, viewer
from paceline_server.api.dependencies import Bounds, BoundsDep, PartsDep, ReadDep
from paceline_server.api.paging import clean
from paceline_server.api.problems import ProblemError, not_found
from paceline_server.decide.types import AuditEntry
from paceline_server.store import audit, commands, models, queries
from paceline_server.store.changes import record_change

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get(
    "",
    dependencies=[viewer],
    response_model=schemas.NodePage,
    responses=problems.responses(401, 403, 422, 503),
)
def list_nodes(session: ReadDep, bounds: BoundsDep, parts: PartsDep) -> schemas.NodePage:
    """List nodes by name."""
    after = None if bounds.after is None else clean(bounds.after)
    rows = queries.nodes(session, bounds.limit, after)
    more = len(rows) == bounds.limit
    return schemas.NodePage(
        items=[resources.node(session, row, parts.as_of()) for row in rows],
        next_cursor=Bounds.encode(rows[-1].agent_id) if more else None,
    )


@router.post(
    "/{node_id}/release",
    response_model=schemas.Node,
    responses=problems.responses(401, 403, 404, 503),
)
def release_node(node_id: str, parts: PartsDep, caller: Operator) -> schemas.Node:
    """End a node's quarantine. Has no effect on a node that is not quarantined."""
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = _find(session, node_id)
        if row.quarantine_reason is not None:
            entry = AuditEntry(
                actor=caller.name, verb="released", subject=node_id, detail=row.quarantine_reason
            )
            audit.record(session, row.job_id, entry, now_ns)
            row.quarantine_reason = None
            session.flush()
            record_change(session, None, "node", node_id)
        released = resources.node(session, row, parts.as_of())
    parts.signals.work.notify()
    parts.signals.changes.notify()
    return released


@router.post(
    "/{node_id}/burst",
    status_code=202,
    response_model=schemas.Node,
    responses=problems.responses(401, 403, 404, 409, 422, 503),
)
def burst_node(
    node_id: str, request: schemas.BurstRequest, parts: PartsDep, caller: Operator
) -> schemas.Node:
    """Collect metrics ten times a second for at most 30 s, on a node that has ranks."""
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        row = _find(session, node_id)
        if row.job_id is None:
            raise ProblemError(
                409, f"{node_id} has no ranks; a burst needs a node with running ranks."
            )
        commands.request_burst(session, row, request.collectors, request.seconds, now_ns)
        detail = f"{', '.join(request.collectors) or 'all collectors'}, {request.seconds:g} s"
        entry = AuditEntry(actor=caller.name, verb="burst", subject=node_id, detail=detail)
        audit.record(session, row.job_id, entry, now_ns)
        asked = resources.node(session, row, parts.as_of())
    parts.signals.commands.notify()
    return asked


def _find(session: Session, node_id: str) -> models.NodeRow:
    row = session.get(models.NodeRow, node_id) if "\0" not in node_id else None
    if row is None:
        raise not_found("node", node_id)
    return row
