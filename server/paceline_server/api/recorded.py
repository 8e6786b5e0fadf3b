"""A job's last steps, measured again from the batches that its agents sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from sqlalchemy.orm import Session

from paceline_server.engine.remeasure import remeasure
from paceline_server.engine.types import Placement
from paceline_server.steps.timing import StepTiming
from paceline_server.store import models, queries
from paceline_server.store.log import position_at, walk_log
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, BatchError

# A step's first spans were sent before the server's clock says that it began, if clocks disagree.
MARGIN_NS = 5_000_000_000
# Ranks define their groups when they attach: so many batches of a generation are looked through.
DEFINING_BATCHES = 1000
# More is not read for one answer.
MOST_BATCHES = 20_000


@dataclass(frozen=True)
class Recorded:
    placement: Placement
    timings: list[StepTiming]  # of the steps of which enough is kept


def recorded_steps(session: Session, job: models.JobRow, steps: int) -> Recorded | None:
    """The newest `steps` of the current generation; None: it has finished none."""
    generation = session.get(models.GenerationRow, (job.id, job.generation))
    newest = queries.steps(session, job.id, None, steps, job.generation)
    if generation is None or not newest:
        return None
    wanted = {each.step: each.summary.started_ns for each in newest}
    batches = _batches(session, generation, min(wanted.values()) - MARGIN_NS)
    timings = remeasure(job.id, generation.placement, batches)
    return Recorded(generation.placement, [timing for timing in timings if timing.step in wanted])


def _batches(
    session: Session, generation: models.GenerationRow, since_ns: int
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


def _decoded(entry: models.HotLogRow) -> Iterator[Batch]:
    try:
        yield wire.decode(entry.payload)
    except BatchError:  # counted when it was first read
        return
