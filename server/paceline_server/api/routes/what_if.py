"""What-if analysis: where a job's time goes, and the gain of each fix."""

from __future__ import annotations

from typing import Annotated

from anyio.to_thread import run_sync
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
async def get_what_if(
    job_id: str,
    parts: PartsDep,
    steps: Annotated[
        int, Query(ge=1, le=100, description="Number of newest steps; fewer for large jobs.")
    ] = 8,
) -> schemas.WhatIf:
    """Replay the last steps with parts of them as fast as their peers.

    Returns slowdowns, the gain of fixing each part, and the gain of other schedules; see
    docs/what-if.md. If the steps cannot be replayed yet, `verdict.kind` is `unknown` and its text
    says what to do.
    """
    found = parts.what_ifs
    return await run_sync(found.get, parts.database, job_id, steps, limiter=found.limiter)
