"""A job's newest steps, reconstructed from the batches in the hot log, or kept at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from sqlalchemy.orm import Session

from paceline_server.engine.definitions import Definitions
from paceline_server.engine.engine import definitions_in
from paceline_server.engine.remeasure import remeasure
from paceline_server.engine.types import Placement
from paceline_server.steps.timing import StepTiming
from paceline_server.store import models, queries
from paceline_server.store.kept_logs import MARGIN_NS, kept_batches
from paceline_server.store.log import iterate_log, position_at
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, BatchError

# Ranks define their process groups when they attach: the first batches of a generation are read.
DEFINING_BATCHES = 1000
# Limit for one request.
MOST_BATCHES = 20_000


@dataclass(frozen=True)
class RecordedSteps:
    """Timings of a job's newest steps, and the placement they ran with."""

    placement: Placement
    timings: list[StepTiming]  # only of steps that are fully stored


def recorded_steps(session: Session, job: models.JobRow, steps: int) -> RecordedSteps | None:
    """Return the newest `steps` of the current generation; None if it has finished none."""
    generation = session.get(models.GenerationRow, (job.id, job.generation))
    newest = queries.steps(session, job.id, None, steps, job.generation)
    if generation is None or not newest:
        return None
    started_ns = {row.step: row.summary.started_ns for row in newest}
    placement = generation.placement
    batches = _batches(session, generation, min(started_ns.values()) - MARGIN_NS)
    definitions = _definitions(session, job.id)

    def measured(batches: Iterable[tuple[Batch, int]]) -> list[StepTiming]:
        timings = remeasure(job.id, placement, batches, definitions)
        return [timing for timing in timings if timing.step in started_ns]

    timings = measured(batches)
    if len(timings) < len(newest):
        kept = kept_batches(session, job.id, job.generation)
        timings = max(timings, measured(_decoded(kept)), key=len)
    return RecordedSteps(placement, timings)


def _definitions(session: Session, job_id: str) -> Definitions | None:
    """Return what the ranks have defined; their batches may have been pruned."""
    memory = session.get(models.EngineMemoryRow, job_id)
    with suppress(msgspec.DecodeError):  # a later release wrote it
        return None if memory is None else definitions_in(memory.memory)
    return None


def _batches(
    session: Session, generation: models.GenerationRow, since_ns: int
) -> Iterator[tuple[Batch, int]]:
    """Yield the definitions at the start of a generation, then all batches from `since_ns` on."""
    begin = max(position_at(session, since_ns), generation.cursor)
    defining = min(DEFINING_BATCHES, begin - generation.cursor)
    definitions = iterate_log(session, generation.cursor, defining)
    for batch, received_ns in _decoded(_stored(definitions)):
        yield msgspec.structs.replace(batch, spans=[], samples=[]), received_ns
    yield from _decoded(_stored(iterate_log(session, begin, MOST_BATCHES)))


def _stored(entries: Iterable[models.HotLogRow]) -> Iterator[tuple[int, bytes]]:
    return ((entry.received_ns, entry.payload) for entry in entries)


def _decoded(stored: Iterable[tuple[int, bytes]]) -> Iterator[tuple[Batch, int]]:
    """Yield batches and when they were received."""
    for received_ns, payload in stored:
        with suppress(BatchError):  # counted when it was first read
            yield wire.decode(payload), received_ns
