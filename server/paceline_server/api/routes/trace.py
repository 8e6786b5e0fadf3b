"""The recorded operations of a job's last steps as Parquet, for `paceline analyze` and others."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

from fastapi import APIRouter, Query, Response

from paceline_server.api import problems
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import ReadDep
from paceline_server.api.problems import ProblemError
from paceline_server.api.recorded import RecordedSteps, recorded_steps
from paceline_server.api.routes.jobs import find
from paceline_server.whatif.export import Export, export
from paceline_server.whatif.online import RunReplay

router = APIRouter(prefix="/jobs", tags=["jobs"])

MEDIA_TYPE = "application/vnd.apache.parquet"
SIZES_HEADER = "Paceline-Sizes"

_SIZES = {
    "dp_size": 2,
    "pp_size": 2,
    "tp_size": 2,
    "dsp_size": 1,
    "vpp_size": 1,
    "world_size": 8,
}


@router.get(
    "/{job_id}/trace",
    dependencies=[viewer],
    response_class=Response,
    responses={
        200: {
            "description": "The operations of the last steps; see docs/what-if.md.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
            "headers": {
                SIZES_HEADER: {
                    "description": "The metadata of the trace, as JSON.",
                    "schema": {"type": "string"},
                    "example": json.dumps(_SIZES),
                }
            },
        },
        **problems.responses(401, 403, 404, 409, 422, 503),
    },
)
def get_trace(
    job_id: str,
    session: ReadDep,
    steps: Annotated[int, Query(ge=1, le=100, description="Number of newest steps.")] = 8,
) -> Response:
    """Return the last steps of the current generation as a trace, one row per operation."""
    row = find(session, job_id)
    recorded = recorded_steps(session, row, steps)
    if recorded is None:
        raise ProblemError(
            409,
            "No step of the current generation has finished yet; try again after the first one.",
        )
    exported = _export(recorded)
    if exported is None:
        raise ProblemError(
            409,
            "Too few of the last steps are stored to reconstruct the order of operations.",
        )
    # Imported on use: Arrow takes memory that most servers never need.
    writer = importlib.import_module("paceline_server.whatif.writer")
    return Response(
        writer.to_parquet(exported),
        media_type=MEDIA_TYPE,
        headers={
            "Content-Disposition": f'attachment; filename="{job_id}.parquet"',
            SIZES_HEADER: json.dumps(exported.sizes),
        },
    )


def _export(recorded: RecordedSteps) -> Export | None:
    placement = recorded.placement
    built = RunReplay(recorded.timings, placement.topology, placement.metadata).built
    if built is None:
        return None
    started = {timing.step: float(timing.ranks.start_ns.min()) / 1e9 for timing in recorded.timings}
    return export(built, started)
