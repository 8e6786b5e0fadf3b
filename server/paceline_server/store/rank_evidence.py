"""The newest stacks and Flight Recorder dumps of ranks, taken on demand or during a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.types import IssuedCommand
from paceline_server.store import queries
from paceline_server.store.commands import issue, reserve_command_ids
from paceline_server.store.models import CommandRow, JobRow, RankEvidenceRow, RankRow
from paceline_wire.batch import RankDump, RankStackTraces
from paceline_wire.commands import TakeDumps, TakeStacks

_TAGS: dict[type, str] = {RankStackTraces: "rank_stacks", RankDump: "rank_dump"}
_ON_DEMAND = "on-demand"  # stored in place of a command's action id


_Event = TypeVar("_Event", RankStackTraces, RankDump)


@dataclass(frozen=True, slots=True)
class ReceivedEvidence(Generic[_Event]):
    """One event and when the server received it."""

    event: _Event
    received_ns: int


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """The newest request for one rank; `ok` is None until the agent has responded."""

    at_ns: int
    ok: bool | None
    detail: str | None


def store_evidence(
    session: Session, agent_id: str, event: RankStackTraces | RankDump, received_ns: int
) -> None:
    """Store an event; ignore it if the rank is on another node or belongs to another generation."""
    rank = session.get(RankRow, (event.job, event.rank)) if "\0" not in event.job else None
    if rank is None or rank.agent_id != agent_id:
        return
    reported = queries.reported_generations(session, session.get_one(JobRow, rank.job_id))
    if event.generation != reported.get(rank.rank, rank.generation):
        return
    session.merge(
        RankEvidenceRow(
            job_id=event.job,
            rank=event.rank,
            kind=_TAGS[type(event)],
            generation=rank.generation,
            received_ns=received_ns,
            body=event,
        )
    )


def newest_stacks(
    session: Session, job_id: str, rank: int
) -> ReceivedEvidence[RankStackTraces] | None:
    """Return the newest stacks of a rank."""
    row = session.get(RankEvidenceRow, (job_id, rank, _TAGS[RankStackTraces]))
    if row is None or not isinstance(row.body, RankStackTraces):
        return None
    return ReceivedEvidence(row.body, row.received_ns)


def newest_dumps(
    session: Session, job_id: str, generation: int
) -> list[ReceivedEvidence[RankDump]]:
    """Return the newest dump of each rank of one generation, ordered by rank."""
    query = select(RankEvidenceRow).where(
        RankEvidenceRow.job_id == job_id,
        RankEvidenceRow.kind == _TAGS[RankDump],
        RankEvidenceRow.generation == generation,
    )
    rows = session.scalars(query.order_by(RankEvidenceRow.rank))
    return [
        ReceivedEvidence(row.body, row.received_ns)
        for row in rows
        if isinstance(row.body, RankDump)
    ]


def request_evidence(
    session: Session,
    job: JobRow,
    ranks: Sequence[RankRow],
    command_type: type[TakeStacks | TakeDumps],
    now_ns: int,
) -> None:
    """Request stacks or dumps of ranks; issues one command per node."""
    by_agent: dict[str, list[int]] = {}
    for rank in ranks:
        by_agent.setdefault(rank.agent_id, []).append(rank.rank)
    ids = reserve_command_ids(session, len(by_agent))
    for command_id, (agent_id, numbers) in zip(ids, sorted(by_agent.items()), strict=True):
        command = command_type(
            command_id=command_id, job=job.id, generation=job.generation, ranks=numbers
        )
        issued = IssuedCommand(agent_id=agent_id, action_id=_action_id(numbers), command=command)
        issue(session, job.id, issued, now_ns)


def newest_stacks_request(session: Session, job_id: str, rank: int) -> EvidenceRequest | None:
    """Return the newest on-demand request for a rank's stacks."""
    query = (
        select(CommandRow)
        .where(
            CommandRow.job_id == job_id,
            CommandRow.action_id == _action_id([rank]),
            CommandRow.kind == "take_stacks",
        )
        .order_by(CommandRow.id.desc())
        .limit(1)
    )
    row = session.scalar(query)
    return None if row is None else EvidenceRequest(row.created_ns, row.ok, row.detail)


def _action_id(ranks: Sequence[int]) -> str:
    return f"{_ON_DEMAND}-{ranks[0]}" if len(ranks) == 1 else _ON_DEMAND
