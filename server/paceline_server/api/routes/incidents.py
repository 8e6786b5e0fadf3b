"""Incidents: one per problem; its symptoms are grouped into it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import BoundsDep, ReadDep
from paceline_server.api.paging import urgency_cursor, urgency_position
from paceline_server.api.problems import not_found
from paceline_server.decide.types import IncidentState
from paceline_server.store import models, queries

router = APIRouter(prefix="/incidents", tags=["incidents"], dependencies=[viewer])


@router.get(
    "", response_model=schemas.IncidentPage, responses=problems.responses(401, 403, 422, 503)
)
def list_incidents(
    session: ReadDep,
    bounds: BoundsDep,
    job: Annotated[
        str | None, Query(description="Only incidents of this job.", pattern="^[^\0]*$")
    ] = None,
    state: IncidentState | None = None,
) -> schemas.IncidentPage:
    """List incidents: unresolved ones of running jobs, then of ended jobs, then resolved ones.

    Each by severity, then cost.
    """
    rows = queries.incidents(session, bounds.limit, urgency_position(bounds), job, state)
    more = len(rows) == bounds.limit
    return schemas.IncidentPage(
        items=resources.incidents(session, rows),
        next_cursor=_cursor(rows[-1]) if more else None,
    )


def _cursor(row: models.IncidentRow) -> str:
    return urgency_cursor(row.urgency, row.opened_ns, row.id)


@router.get(
    "/{incident_id}",
    response_model=schemas.Incident,
    responses=problems.responses(401, 403, 404, 503),
)
def get_incident(incident_id: str, session: ReadDep) -> schemas.Incident:
    row = session.get(models.IncidentRow, incident_id) if "\0" not in incident_id else None
    if row is None:
        raise not_found("incident", incident_id)
    return resources.incident(session, row, in_full=True)
