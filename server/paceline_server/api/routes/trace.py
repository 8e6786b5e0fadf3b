"""What a job recorded of its last steps, for `paceline analyze` and any tool that reads Parquet."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from paceline_server.api import problems
from paceline_server.api.auth import viewer
from paceline_server.api.dependencies import ReadDep
from paceline_server.api.problems import Problem
from paceline_server.api.routes.jobs import find
from paceline_server.engine.recall import recall
from paceline_server.engine.types import Placement
from paceline_server.steps.timing import StepTiming
from paceline_server.store import models, queries
from paceline_server.store.log import position_at, walk_log
from paceline_server.whatif.export import Export, export
from paceline_server.whatif.online import RunReplay
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, BatchError

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

# A step's first spans were sent before the server's clock says that it began, if clocks disagree.
MARGIN_NS = 5_000_000_000
# Ranks define their groups when they attach: so many batches of a generation are looked through.
DEFINING_BATCHES = 1000
# More is not read for one answer.
MOST_BATCHES = 20_000


@router.get(
    "/{job_id}/trace",
    dependencies=[viewer],
    response_class=Response,
    responses={
        200: {
            "description": "The operations of the last steps: see docs/what-if.md.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
            "headers": {
                SIZES_HEADER: {
                    "description": "What the metadata beside a trace says, as JSON.",
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
    steps: Annotated[int, Query(ge=1, le=100, description="How many of the newest.")] = 8,
) -> Response:
    """The last steps of the current generation in the trace layout, one row per operation."""
    row = find(session, job_id)
    generation = session.get(models.Generation, (job_id, row.generation))
    newest = queries.steps(session, job_id, None, steps, row.generation)
    if generation is None or not newest:
        raise Problem(409, "No step of the current generation is finished yet.")
    wanted = {each.step: each.summary.started_ns for each in newest}
    timings = recall(
        job_id,
        generation.placement,
        _batches(session, generation, min(wanted.values()) - MARGIN_NS),
    )
    exported = _export(
        [timing for timing in timings if timing.step in wanted], generation.placement
    )
    if exported is None:
        raise Problem(
            409,
            "What is kept of the last steps is too little to know in which order the job works.",
        )
    # Arrow costs memory that a server need not have which is never asked for a trace.
    writer = importlib.import_module("paceline_server.whatif.writer")
    return Response(
        writer.to_parquet(exported),
        media_type=MEDIA_TYPE,
        headers={
            "Content-Disposition": f'attachment; filename="{job_id}.parquet"',
            SIZES_HEADER: json.dumps(exported.sizes),
        },
    )


def _batches(
    session: Session, generation: models.Generation, since_ns: int
) -> Iterator[tuple[Batch, int]]:
    """What the ranks defined at the beginning, then everything from `since_ns` on."""
    begin = max(position_at(session, since_ns), generation.cursor)
    defining = min(DEFINING_BATCHES, begin - generation.cursor)
    for entry in walk_log(session, generation.cursor, defining):
        for batch in _decoded(entry):
            yield msgspec.structs.replace(batch, spans=[], samples=[]), entry.received_ns
    for entry in walk_log(session, begin, MOST_BATCHES):
        for batch in _decoded(entry):
            yield batch, entry.received_ns


def _decoded(entry: models.HotLog) -> Iterator[Batch]:
    try:
        yield wire.decode(entry.payload)
    except BatchError:  # counted when it was first read
        return


def _export(timings: list[StepTiming], placement: Placement) -> Export | None:
    built = RunReplay(timings, placement.topology, placement.metadata).built
    if built is None:
        return None
    started = {timing.step: float(timing.ranks.start_ns.min()) / 1e9 for timing in timings}
    return export(built, started)
