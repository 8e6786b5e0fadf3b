"""Ranks of external jobs (torchrun, Slurm, a shell) that agents found running.

Ingest records each attached rank. A worker creates the job once all ranks of a run have attached.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace
from sqlalchemy import ColumnElement, and_, case, delete, func, not_, or_, select, update
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.log import FINISHED
from paceline_server.store.models import AttachmentRow, GenerationRow, JobRow, NodeRow, RankRow
from paceline_wire.batch import RankAttached, RankExited
from paceline_wire.job_name import is_job_name
from paceline_wire.ring import Identity
from paceline_wire.topology import RANKS_AT_MOST

_SILENT_NS = 5_000_000_000  # longer than the pause of any live agent
_ROOT = 0
_CLOCKS_DIFFER_NS = 60_000_000_000  # more than the clocks of two nodes do


class PendingRun(NamedTuple):
    """Attached ranks of one run that has no job yet; all report the same world size.

    They may report different generation numbers: torchrun counts restarts on each node separately.
    """

    job_id: str
    generation: int  # the highest
    world_size: int
    ranks: int
    oldest_ns: int  # when the first of them was received
    newest_ns: int

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks have attached."""
        return self.ranks == self.world_size


def record_attached(session: Session, agent_id: str, event: RankAttached, received_ns: int) -> None:
    """Record an attached rank, except for ranks of Paceline's own jobs, placed processes, and those
    that another node's process has replaced."""
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
    found = session.get(AttachmentRow, tuple(keys.values()), populate_existing=True)
    if found is not None and found.agent_id != agent_id and _is_before(identity, found):
        return  # a lost node is back, and reports what ran on it before the other started
    _discard_earlier_generations(session, agent_id, identity)
    is_same_process = (
        AttachmentRow.agent_id == agent_id,
        AttachmentRow.started_ns == identity.started_ns,
    )
    session.execute(
        insert_into(session, AttachmentRow)
        .values(**keys, **row)
        .on_conflict_do_update(
            index_elements=list(keys),
            set_=row,
            where=or_(not_(and_(*is_same_process)), AttachmentRow.placed.is_(False)),
        )
    )


def _is_before(identity: Identity, found: AttachmentRow) -> bool:
    """Return whether a process certainly started before one of another node."""
    other = found.identity
    other_ns = min(other.started_ns + other.clock_offset_ns, found.received_ns)
    return identity.started_ns + identity.clock_offset_ns < other_ns - _CLOCKS_DIFFER_NS


def _discard_earlier_generations(session: Session, agent_id: str, identity: Identity) -> None:
    """Discard this node's earlier generations, because a launcher ends one before it starts the
    next."""
    earlier = (
        AttachmentRow.job_id == identity.job,
        AttachmentRow.agent_id == agent_id,
        AttachmentRow.generation != identity.generation,
        AttachmentRow.started_ns < identity.started_ns,
        AttachmentRow.placed.is_(False),
    )
    session.execute(update(AttachmentRow).where(*earlier).values(placed=True))


def record_exit(session: Session, agent_id: str, event: RankExited, received_ns: int) -> None:
    """Record the exit of a rank whose run is still incomplete, or loads."""
    keys = event.job, event.generation, event.rank
    row = (
        session.get(AttachmentRow, keys, populate_existing=True) if "\0" not in event.job else None
    )
    if row is None or row.placed:
        return
    if (row.agent_id, row.identity.pid) == (agent_id, event.pid):
        row.ended_ns = received_ns
        if event.exit_code or event.signal:  # a failure is shown, also one before the first record
            row.identity = replace(row.identity, is_reserved=False)


def discard_ended(session: Session, before_ns: int) -> None:
    """Discard ranks that ended before `before_ns`, because later ranks belong to another run."""
    ended = AttachmentRow.placed.is_(False), AttachmentRow.ended_ns < before_ns
    session.execute(update(AttachmentRow).where(*ended).values(placed=True))


def pending_runs(session: Session, job_id: str | None = None) -> list[PendingRun]:
    """Return the pending runs of one job, or of all jobs.

    A rank of an earlier generation than others counts only while its node responds: a lost node
    does not report that it ended.
    """
    columns = AttachmentRow.job_id, AttachmentRow.world_size
    pending = (
        select(
            *columns,
            func.max(AttachmentRow.generation).label("generation"),
            func.min(AttachmentRow.received_ns).label("oldest_ns"),
            func.max(AttachmentRow.received_ns).label("newest_ns"),
        )
        .where(AttachmentRow.placed.is_(False))
        .group_by(*columns)
        .subquery()
    )
    run = pending.c
    is_left = and_(
        AttachmentRow.generation < run.generation,
        NodeRow.last_seen_ns < run.newest_ns - _SILENT_NS,
    )
    counted = case((is_left, None), else_=AttachmentRow.rank)
    query = (
        select(
            *columns,
            run.generation,
            func.count(counted.distinct()),
            run.oldest_ns,
            run.newest_ns,
        )
        .join(pending, and_(*(column == run[column.key] for column in columns)))
        .outerjoin(NodeRow, NodeRow.agent_id == AttachmentRow.agent_id)
        .where(AttachmentRow.placed.is_(False))
        .group_by(*columns, run.generation, run.oldest_ns, run.newest_ns)
        .order_by(*columns)
    )
    if job_id is not None:
        query = query.where(AttachmentRow.job_id == job_id)
    return [
        PendingRun(name, generation, world_size, ranks, oldest_ns, newest_ns)
        for name, world_size, generation, ranks, oldest_ns, newest_ns in session.execute(query)
    ]


def is_newer_run(session: Session, job: JobRow, pending: PendingRun) -> bool:
    """Return whether a pending run started after the job's current generation.

    If not, its events arrived late. Another run of the same name restarts at generation 0.
    """
    if pending.generation > job.generation:
        return True
    current = session.get(GenerationRow, (job.id, job.generation))
    return current is None or pending.oldest_ns > current.placement.started_ns


def is_superseded(session: Session, job: JobRow) -> bool:
    """Return whether a later run of an external job is complete and replaces the current one.

    A node has one process per rank. The ranks of a run on the same nodes are therefore gone, even
    if their exit was never reported because the node rebooted or its agent was down.
    """
    complete = [run for run in pending_runs(session, job.id) if run.is_complete]
    for later in (run for run in complete if is_newer_run(session, job, run)):
        nodes = select(AttachmentRow.agent_id).where(*_conditions(later))
        remaining = select(RankRow.rank).where(RankRow.job_id == job.id, RankRow.state != "exited")
        on_other_nodes = remaining.where(RankRow.agent_id.not_in(nodes)).limit(1)
        if session.scalar(on_other_nodes) is None:
            return True
        if later.generation > job.generation and not is_of_another_user(session, job, later):
            return True
    return False


def is_of_another_user(session: Session, job: JobRow, pending: PendingRun) -> bool:
    """Return whether no user of the job's current ranks, nor root, runs any of a pending run.

    Agents compare the users of a job on their own node only.
    """
    current = session.get(GenerationRow, (job.id, job.generation))
    users = set() if current is None else set(current.placement.users)
    later = {row.identity.user for row in ranks_of(session, pending)}
    return bool(users) and users.isdisjoint(later) and not later & {None, _ROOT}


def ranks_of(session: Session, pending: PendingRun) -> Sequence[AttachmentRow]:
    """Return the rows of a pending run."""
    return session.scalars(select(AttachmentRow).where(*_conditions(pending))).all()


def is_loading(session: Session, pending: PendingRun) -> bool:
    """Return whether no rank of a pending run has recorded anything: it may not train at all."""
    return all(row.identity.is_reserved for row in ranks_of(session, pending))


def claim(session: Session, pending: PendingRun) -> list[AttachmentRow]:
    """Claim a pending run and return its ranks in order; only one worker can claim it."""
    claimed = session.scalars(
        update(AttachmentRow)
        .where(*_conditions(pending))
        .values(placed=True)
        .returning(AttachmentRow)
    )
    newest = {row.rank: row for row in sorted(claimed, key=attrgetter("received_ns"))}
    return [newest[rank] for rank in sorted(newest)]


def _conditions(pending: PendingRun) -> tuple[ColumnElement[bool], ...]:
    return (
        AttachmentRow.job_id == pending.job_id,
        AttachmentRow.world_size == pending.world_size,
        AttachmentRow.placed.is_(False),
    )


def prune_attachments(session: Session, before_ns: int) -> None:
    """Delete old rows, except those of unfinished jobs: an agent may report them again."""
    unfinished = select(JobRow.id).where(JobRow.state.not_in(FINISHED))
    is_old = AttachmentRow.received_ns < before_ns, AttachmentRow.job_id.not_in(unfinished)
    session.execute(delete(AttachmentRow).where(*is_old))
