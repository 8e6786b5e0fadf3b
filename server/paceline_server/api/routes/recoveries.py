"""Times of finished recoveries, as distributions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from paceline_server.api import problems, recoveries, schemas
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import PartsDep, ReadDep
from paceline_server.store import recoveries as stored

router = APIRouter(prefix="/recoveries", tags=["incidents"], dependencies=[viewer])


@router.get(
    "", response_model=schemas.RecoveryReport, responses=problems.responses(401, 403, 422, 503)
)
def list_recoveries(
    session: ReadDep,
    parts: PartsDep,
    days: Annotated[int, Query(ge=1, le=3660, description="Only the last days.")] = 28,
    job: Annotated[
        str | None, Query(description="Only recoveries of this job.", pattern="^[^\0]*$")
    ] = None,
) -> schemas.RecoveryReport:
    """Return how long recoveries took: quantiles of each part by kind, launcher and week."""
    since_ns = max(0, parts.now_ns() - days * recoveries.DAY_NS)
    return recoveries.report(stored.since(session, since_ns, recoveries.ROWS, job), since_ns)
