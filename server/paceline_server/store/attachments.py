"""Ranks that agents found running, of jobs that somebody else started: torchrun, Slurm, a shell.

Ingest writes what it hears, a worker makes a job of it once all ranks of a generation are there.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, not_, select, update
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.log import FINISHED
from paceline_server.store.models import AttachmentRow, GenerationRow, JobRow, RankRow
from paceline_wire.batch import RankAttached, RankExited
from paceline_wire.job_name import is_job_name
from paceline_wire.ring import Identity
from paceline_wire.topology import RANKS_AT_MOST


class Gathering(NamedTuple):
    """Ranks of one run that were not taken up yet, and agree on how many they are.

    They need not agree on the number of their generation: torchrun counts on each node the restarts
    that began there.
    """

    job_id: str
    generation: int  # the highest
    world_size: int
    ranks: int
    oldest_ns: int  # when the first of them was heard of
    newest_ns: int

    @property
    def is_whole(self) -> bool:
        return self.ranks == self.world_size


def keep(session: Session, agent_id: str, event: RankAttached, received_ns: int) -> None:
    """But for ranks of jobs that we started, and for processes that are known."""
    identity = event.identity
    job_id, world_size = identity.job, identity.world_size
    if not is_job_name(job_id) or not 0 <= identity.rank < world_size <= RANKS_AT_MOST:
        return
    if session.scalar(select(JobRow.watched).where(JobRow.id == job_id)) is False:
        return
    row = {
        "agent_id": agent_id,
        "started_ns": identity.started_ns,
        "world_size": world_size,
        "received_ns": received_ns,
        "ended_ns": None,
        "placed": False,
        "identity": identity,
    }
    keys = {"job_id": job_id, "generation": identity.generation, "rank": identity.rank}
    _give_up_earlier(session, agent_id, identity)
    same = AttachmentRow.agent_id == agent_id, AttachmentRow.started_ns == identity.started_ns
    session.execute(
        insert_into(session, AttachmentRow)
        .values(**keys, **row)
        .on_conflict_do_update(index_elements=list(keys), set_=row, where=not_(and_(*same)))
    )


def _give_up_earlier(session: Session, agent_id: str, identity: Identity) -> None:
    """A node's launcher ends the processes of one generation before it starts those of another."""
    earlier = (
        AttachmentRow.job_id == identity.job,
        AttachmentRow.agent_id == agent_id,
        AttachmentRow.generation != identity.generation,
        AttachmentRow.started_ns < identity.started_ns,
        AttachmentRow.placed.is_(False),
    )
    session.execute(update(AttachmentRow).where(*earlier).values(placed=True))


def end(session: Session, agent_id: str, event: RankExited, received_ns: int) -> None:
    """Of a rank whose run is not whole yet."""
    keys = event.job, event.generation, event.rank
    row = (
        session.get(AttachmentRow, keys, populate_existing=True) if "\0" not in event.job else None
    )
    if row is None or row.placed:
        return
    if (row.agent_id, row.identity.pid) == (agent_id, event.pid):
        row.ended_ns = received_ns


def give_up(session: Session, before_ns: int) -> None:
    """Ranks that ended by then gather no more: those that are still to come are of another run."""
    ended = AttachmentRow.placed.is_(False), AttachmentRow.ended_ns < before_ns
    session.execute(update(AttachmentRow).where(*ended).values(placed=True))


def gathering(session: Session, job_id: str | None = None) -> list[Gathering]:
    """Of one job, or of all."""
    query = select(
        AttachmentRow.job_id,
        func.max(AttachmentRow.generation),
        AttachmentRow.world_size,
        func.count(AttachmentRow.rank.distinct()),
        func.min(AttachmentRow.received_ns),
        func.max(AttachmentRow.received_ns),
    ).where(AttachmentRow.placed.is_(False))
    if job_id is not None:
        query = query.where(AttachmentRow.job_id == job_id)
    together = AttachmentRow.job_id, AttachmentRow.world_size
    rows = session.execute(query.group_by(*together).order_by(*together))
    return [Gathering(*row) for row in rows]


def follows(session: Session, job: JobRow, gathered: Gathering) -> bool:
    """Whether it came after what is known of a job; else it is news that were late.

    Another run of the same name counts its generations anew.
    """
    if gathered.generation > job.generation:
        return True
    known = session.get(GenerationRow, (job.id, job.generation))
    return known is None or gathered.oldest_ns > known.placement.started_ns


def is_superseded(session: Session, job: JobRow) -> bool:
    """Whether a later run of a watched job is whole, and this one cannot go on beside it.

    A node has one process of a rank, so those of a run on the same nodes are gone, even where
    nobody told their end: the node was started anew, or its agent was away.
    """
    whole = [each for each in gathering(session, job.id) if each.is_whole]
    for later in (each for each in whole if follows(session, job, each)):
        nodes = select(AttachmentRow.agent_id).where(*_of(later))
        left = select(RankRow.rank).where(RankRow.job_id == job.id, RankRow.state != "exited")
        is_beside = left.where(RankRow.agent_id.not_in(nodes)).limit(1)
        if later.generation > job.generation or session.scalar(is_beside) is None:
            return True
    return False


def take(session: Session, gathered: Gathering) -> list[AttachmentRow]:
    """They gather no more. Only one worker is given them, in the order of their ranks."""
    taken = session.scalars(
        update(AttachmentRow).where(*_of(gathered)).values(placed=True).returning(AttachmentRow)
    )
    newest = {each.rank: each for each in sorted(taken, key=attrgetter("received_ns"))}
    return [newest[rank] for rank in sorted(newest)]


def _of(gathered: Gathering) -> tuple[ColumnElement[bool], ...]:
    return (
        AttachmentRow.job_id == gathered.job_id,
        AttachmentRow.world_size == gathered.world_size,
        AttachmentRow.placed.is_(False),
    )


def forget(session: Session, before_ns: int) -> None:
    """But for those of jobs that go on: an agent may tell of them again."""
    goes_on = select(JobRow.id).where(JobRow.state.not_in(FINISHED))
    is_old = AttachmentRow.received_ns < before_ns, AttachmentRow.job_id.not_in(goes_on)
    session.execute(delete(AttachmentRow).where(*is_old))
