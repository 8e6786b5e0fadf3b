"""Python stacks and Flight Recorder dumps of a running job's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as InPath
from sqlalchemy.orm import Session

from paceline_server.api import problems, resources, schemas
from paceline_server.api.auth import Operator, viewer
from paceline_server.api.dependencies import Parts, PartsDep, ReadDep
from paceline_server.api.problems import ProblemError, not_found
from paceline_server.api.routes.jobs import find
from paceline_server.api.times import time_of
from paceline_server.decide.types import AuditEntry
from paceline_server.store import audit, models, queries, rank_evidence
from paceline_server.store.log import FINISHED
from paceline_wire.commands import TakeDumps, TakeStacks

router = APIRouter(prefix="/jobs", tags=["jobs"])
_READ = problems.responses(401, 403, 404, 422, 503)
_ASK = {**_READ, **problems.responses(409)}
RankNumber = Annotated[int, InPath(ge=0, lt=1 << 31)]


@router.post(
    "/{job_id}/ranks/{rank}/stacks",
    status_code=202,
    response_model=schemas.RankStacks,
    responses=_ASK,
)
def take_stacks(
    job_id: str, rank: RankNumber, parts: PartsDep, caller: Operator
) -> schemas.RankStacks:
    """Request the rank's Python stacks, read without stopping it. GET returns them."""
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        job = find(session, job_id)
        row = _rank(session, job_id, rank)
        _request(session, job, _alive(job, [row]), TakeStacks, caller.name, f"rank {rank}", now_ns)
        asked = resources.rank_stacks(session, job_id, rank)
    parts.signals.commands.notify()
    return asked


@router.get(
    "/{job_id}/ranks/{rank}/stacks",
    dependencies=[viewer],
    response_model=schemas.RankStacks,
    responses=_READ,
)
def get_stacks(job_id: str, rank: RankNumber, session: ReadDep) -> schemas.RankStacks:
    """Return the newest stacks of the rank, taken on demand or during a hang."""
    find(session, job_id)
    _rank(session, job_id, rank)
    return resources.rank_stacks(session, job_id, rank)


@router.post(
    "/{job_id}/flight-recorder",
    status_code=202,
    response_model=schemas.FlightRecorder,
    responses=_ASK,
)
def take_dumps(job_id: str, parts: PartsDep, caller: Operator) -> schemas.FlightRecorder:
    """Request a Flight Recorder dump of every rank. GET returns the analysis."""
    now_ns = parts.now_ns()
    with parts.database.read() as session:
        known = _flight_recorder(parts, session, find(session, job_id))
    with parts.database.write() as session:
        job = find(session, job_id)
        ranks = _alive(job, queries.ranks(session, job_id))
        _request(session, job, ranks, TakeDumps, caller.name, "all ranks", now_ns)
    parts.signals.commands.notify()
    return known


@router.get(
    "/{job_id}/flight-recorder",
    dependencies=[viewer],
    response_model=schemas.FlightRecorder,
    responses=_READ,
)
def get_dumps(job_id: str, parts: PartsDep, session: ReadDep) -> schemas.FlightRecorder:
    """Analyze the newest dumps of the current generation; see docs/flight-recorder.md."""
    return _flight_recorder(parts, session, find(session, job_id))


def _rank(session: Session, job_id: str, rank: int) -> models.RankRow:
    row = session.get(models.RankRow, (job_id, rank))
    if row is None:
        raise not_found("rank", str(rank))
    return row


def _alive(job: models.JobRow, ranks: Sequence[models.RankRow]) -> list[models.RankRow]:
    alive = [rank for rank in ranks if rank.state != "exited"]
    if job.state in FINISHED or not alive:
        raise ProblemError(
            409, f"The job is {job.state} and the rank is not running: there is no process to read."
        )
    return alive


def _request(
    session: Session,
    job: models.JobRow,
    ranks: Sequence[models.RankRow],
    command_type: type[TakeStacks | TakeDumps],
    actor: str,
    detail: str,
    now_ns: int,
) -> None:
    rank_evidence.request_evidence(session, job, ranks, command_type, now_ns)
    verb = "asked for stacks" if command_type is TakeStacks else "asked for Flight Recorder dumps"
    entry = AuditEntry(actor=actor, verb=verb, subject=job.id, detail=detail)
    audit.record(session, job.id, entry, now_ns)
    session.flush()


def _flight_recorder(parts: Parts, session: Session, job: models.JobRow) -> schemas.FlightRecorder:
    dumps = rank_evidence.newest_dumps(session, job.id, job.generation)
    expected = range(job.topology.world_size)
    received, report, text = parts.dump_analyses.analyze(job.id, dumps, expected)
    return schemas.FlightRecorder(
        job_id=job.id,
        generation=job.generation,
        text=text,
        dumps=[
            schemas.RankDumpModel(
                rank=dump.event.rank,
                received_at=time_of(dump.received_ns),
                error=received[dump.event.rank].error,
            )
            for dump in dumps
        ],
        report=None if report is None else report.as_json(),
    )
