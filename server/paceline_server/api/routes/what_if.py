"""Where a job's time goes, and what fixing each thing would give."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from paceline_server.api import problems, schemas
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import PartsDep

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get(
    "/{job_id}/what-if",
    dependencies=[viewer],
    response_model=schemas.WhatIf,
    responses=problems.responses(401, 403, 404, 422, 503),
)
def get_what_if(
    job_id: str,
    of: PartsDep,
    steps: Annotated[
        int, Query(ge=1, le=100, description="How many of the newest, fewer of a large job.")
    ] = 8,
) -> schemas.WhatIf:
    """The last steps replayed with parts of them as fast as their peers: slowdowns, what fixing
    each part gives, and what another schedule would. See docs/what-if.md.

    `verdict.kind` is `unknown`, and its text says what to do, where they cannot be replayed yet.
    """
    return of.what_ifs.of(of.database, job_id, steps)
