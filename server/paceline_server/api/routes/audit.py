"""The audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import Bounds, BoundsDep, ReadDep
from paceline_server.api.paging import number
from paceline_server.store import queries

router = APIRouter(prefix="/audit", tags=["audit"], dependencies=[viewer])


@router.get("", response_model=schemas.AuditPage, responses=problems.responses(401, 403, 422, 503))
def list_audit(
    session: ReadDep,
    bounds: BoundsDep,
    job: Annotated[
        str | None, Query(description="Only entries of this job.", pattern="^[^\0]*$")
    ] = None,
) -> schemas.AuditPage:
    """List entries of the audit log, newest first."""
    before = None if bounds.after is None else number(bounds.after)
    rows = queries.audit(session, bounds.limit, before, job)
    more = len(rows) == bounds.limit
    return schemas.AuditPage(
        items=[resources.audit_record(row) for row in rows],
        next_cursor=Bounds.encode(str(rows[-1].id)) if more else None,
    )
