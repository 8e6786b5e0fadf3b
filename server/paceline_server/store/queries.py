"""Queries of the API. Lists are newest first, incidents worst first, one page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, Text, and_, func, not_, or_, select, type_coerce
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from paceline_server.decide.incidents import live_findings, strength, urgency_of
from paceline_server.decide.types import FailureHistory
from paceline_server.detect.causes.catalog import STOPPED_ON_REQUEST
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import FAILURE, HANG
from paceline_server.engine.types import Launch
from paceline_server.store.log import FINISHED
from paceline_server.store.models import (
    ActionRow,
    AuditRow,
    Base,
    GenerationRow,
    IncidentRow,
    JobRow,
    NodeRow,
    RankRow,
    StepRow,
)

_Row = TypeVar("_Row", JobRow, IncidentRow, ActionRow)
_MOST_AT_END = 100  # incidents that are compared


def newest_first(
    query: Select[_Row],
    at_ns: InstrumentedAttribute[int],
    identifier: InstrumentedAttribute[str],
    after: tuple[int, str] | None,
) -> Select[_Row]:
    """Order by time and id, newest first, from the position `after` (time, id) on."""
    if after is not None:
        earlier = and_(at_ns == after[0], identifier < after[1])
        query = query.where(or_(at_ns < after[0], earlier))
    return query.order_by(at_ns.desc(), identifier.desc())


def jobs(session: Session, limit: int, after: tuple[int, str] | None) -> Sequence[JobRow]:
    """Return one page of jobs, newest first."""
    query = newest_first(select(JobRow), JobRow.created_ns, JobRow.id, after)
    return session.scalars(query.limit(limit)).all()


def earlier_runs(session: Session, job: JobRow, limit: int) -> Sequence[JobRow]:
    """Return the runs of the job's name that were created before it, newest first."""
    row = JobRow
    query = select(row).where(row.name == job.name, row.created_ns < job.created_ns)
    return session.scalars(query.order_by(row.created_ns.desc()).limit(limit)).all()


def usable_launch(session: Session, job: JobRow, *, is_repairing: bool = False) -> Launch | None:
    """Return the launcher that the server repairs the job through; None if it only observes it, or
    starts its ranks itself.

    Args:
        is_repairing: an action is under way; it is finished also if the job is now only observed.
    """
    if not job.watched or (job.policy.mode == "observe" and not is_repairing):
        return None
    generation = session.get(GenerationRow, (job.id, job.generation))
    return None if generation is None else generation.placement.launch


def failure_history(session: Session, since_ns: int) -> FailureHistory:
    """Return the failures and hangs since then, and the time of nodes that ran jobs since then.

    A job counts with the nodes of its last generation.
    """
    job, rank, incident = JobRow, RankRow, IncidentRow
    end_ns = func.coalesce(job.finished_ns, job.ticked_ns)
    nodes = (
        select(rank.job_id, func.count(rank.agent_id.distinct()).label("count"))
        .group_by(rank.job_id)
        .subquery()
    )
    query = (
        select(job.started_ns, end_ns, nodes.c.count)
        .join(nodes, nodes.c.job_id == job.id)
        .where(job.started_ns.is_not(None), end_ns > since_ns)
    )
    node_ns = sum(
        max(0, ended - max(started, since_ns)) * count
        for started, ended, count in session.execute(query)
    )
    # A person who ends ranks is no failure, but a hang that a person ended is one.
    requested = f'"finding":{{"kind":"{FAILURE.name}","cause":"{STOPPED_ON_REQUEST}"'
    failures = session.scalar(
        select(func.count())
        .select_from(incident)
        .where(incident.kind.in_((FAILURE.name, HANG.name)), incident.severity == "critical")
        .where(incident.opened_ns > since_ns)
        .where(not_(type_coerce(incident.view, Text).contains(requested)))
    )
    return FailureHistory(failures or 0, node_ns / 1e9)


def incidents(
    session: Session,
    limit: int,
    after: tuple[float, int, str] | None = None,
    job_id: str | None = None,
    state: str | None = None,
) -> Sequence[IncidentRow]:
    """Return one page of incidents, worst first, then those of ended jobs, then resolved ones.

    It begins after the position `after`: urgency, time and id.
    """
    row = IncidentRow
    query = select(row).where(*_equal((row.job_id, job_id), (row.state, state)))
    if after is not None:
        urgency, opened_ns, identifier = after
        later = or_(
            row.opened_ns < opened_ns, and_(row.opened_ns == opened_ns, row.id < identifier)
        )
        query = query.where(or_(row.urgency < urgency, and_(row.urgency == urgency, later)))
    query = query.order_by(row.urgency.desc(), row.opened_ns.desc(), row.id.desc())
    return session.scalars(query.limit(limit)).all()


def actions(
    session: Session,
    limit: int,
    after: tuple[int, str] | None = None,
    job_id: str | None = None,
    state: str | None = None,
) -> Sequence[ActionRow]:
    """Return one page of actions, newest first."""
    query = select(ActionRow).where(*_equal((ActionRow.job_id, job_id), (ActionRow.state, state)))
    query = newest_first(query, ActionRow.created_ns, ActionRow.id, after)
    return session.scalars(query.limit(limit)).all()


def newest_action(session: Session, job_id: str, kind: str) -> ActionRow | None:
    """Return the newest action of one kind of a job."""
    query = select(ActionRow).where(ActionRow.job_id == job_id, ActionRow.kind == kind)
    return session.scalar(query.order_by(ActionRow.created_ns.desc(), ActionRow.id.desc()).limit(1))


def _equal(*wanted: tuple[Any, str | None]) -> list[ColumnElement[bool]]:
    return [column == value for column, value in wanted if value is not None]


def audit(
    session: Session, limit: int, before: int | None, job_id: str | None
) -> Sequence[AuditRow]:
    """Return one page of the audit log, newest first."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditRow.id < before)
    if job_id is not None:
        query = query.where(AuditRow.job_id == job_id)
    return session.scalars(query).all()


def ranks(session: Session, job_id: str) -> Sequence[RankRow]:
    """Return the ranks of the current generation in order."""
    return session.scalars(
        select(RankRow).where(RankRow.job_id == job_id).order_by(RankRow.rank)
    ).all()


def reported_generations(session: Session, job: JobRow) -> dict[int, int]:
    """Return `Placement.reported_generations` of a watched job; empty for other jobs."""
    generation = session.get(GenerationRow, (job.id, job.generation)) if job.watched else None
    return {} if generation is None else generation.placement.reported_generations


def rank_states(session: Session, job_id: str) -> dict[str, int]:
    """Return the number of ranks by state."""
    return _ranks_by(session, job_id, RankRow.state)


def rank_statuses(session: Session, job_id: str) -> dict[str | None, int]:
    """Return the number of ranks by the status that they report."""
    return _ranks_by(session, job_id, RankRow.status)


def _ranks_by(session: Session, job_id: str, column: InstrumentedAttribute[Any]) -> dict[Any, int]:
    query = select(column, func.count()).where(RankRow.job_id == job_id).group_by(column)
    return dict(session.execute(query).all())


def least_operation_seconds(session: Session, job_id: str) -> float | None:
    """Return how long every running rank has been in its operation; None if it is not known."""
    query = select(
        func.min(RankRow.operation_seconds), func.count(), func.count(RankRow.operation_seconds)
    ).where(RankRow.job_id == job_id, RankRow.state == "attached")
    seconds, count, known = session.execute(query).one()
    return seconds if known == count else None


def ranks_by_operation(session: Session, job_id: str) -> dict[str, list[int]]:
    """Return the running ranks by the operation that they are in."""
    query = select(RankRow.rank, RankRow.operation).where(
        RankRow.job_id == job_id, RankRow.state == "attached", RankRow.operation.is_not(None)
    )
    found: dict[str, list[int]] = {}
    for rank, operation in session.execute(query.order_by(RankRow.rank)):
        found.setdefault(operation or "", []).append(rank)
    return found


def nodes(session: Session, limit: int, after: str | None) -> Sequence[NodeRow]:
    """Return one page of nodes, ordered by name."""
    query = select(NodeRow).order_by(NodeRow.agent_id).limit(limit)
    if after is not None:
        query = query.where(NodeRow.agent_id > after)
    return session.scalars(query).all()


def ranks_on(session: Session, agent_id: str) -> dict[str, list[int]]:
    """Return a node's ranks by unfinished job, oldest job first."""
    query = (
        select(RankRow.job_id, RankRow.rank)
        .join(JobRow, JobRow.id == RankRow.job_id)
        .where(RankRow.agent_id == agent_id, JobRow.state.not_in(FINISHED))
        .order_by(JobRow.created_ns, RankRow.job_id, RankRow.rank)
    )
    found: dict[str, list[int]] = {}
    for job_id, rank in session.execute(query):
        found.setdefault(job_id, []).append(rank)
    return found


def steps(
    session: Session, job_id: str, after: int | None, limit: int, generation: int | None = None
) -> Sequence[StepRow]:
    """Return steps in ascending order: those after `after`, or the newest ones.

    A step that was repeated after a restart appears once, with its newest run.
    """
    newer = aliased(StepRow)
    is_repeated = (
        select(newer.step)
        .where(
            newer.job_id == StepRow.job_id,
            newer.step == StepRow.step,
            newer.generation > StepRow.generation,
        )
        .exists()
    )
    query = select(StepRow).where(StepRow.job_id == job_id, ~is_repeated)
    if generation is not None:
        query = query.where(StepRow.generation == generation)
    if after is not None:
        return session.scalars(
            query.where(StepRow.step > after).order_by(StepRow.step).limit(limit)
        ).all()
    newest = session.scalars(
        query.order_by(StepRow.generation.desc(), StepRow.step.desc()).limit(limit)
    ).all()
    return sorted(newest, key=lambda row: row.step)


def step(session: Session, job_id: str, number: int) -> StepRow | None:
    """Return the newest run of one step."""
    query = select(StepRow).where(StepRow.job_id == job_id, StepRow.step == number)
    return session.scalar(query.order_by(StepRow.generation.desc()).limit(1))


def count_restarts(session: Session, job_id: str) -> int:
    """Return how many times a job was restarted."""
    return _count(
        session,
        GenerationRow.job_id == job_id,
        GenerationRow.restarted.is_not(None),
        of=GenerationRow,
    )


def count_open_incidents(session: Session, job_id: str) -> int:
    """Return the number of a job's unresolved incidents."""
    return _count(
        session, IncidentRow.job_id == job_id, IncidentRow.state != "resolved", of=IncidentRow
    )


def count_pending_actions(session: Session, job_id: str) -> int:
    """Return the number of a job's actions that wait for approval."""
    return _count(session, ActionRow.job_id == job_id, ActionRow.state == "proposed", of=ActionRow)


def _count(session: Session, *conditions: ColumnElement[bool], of: type[Base]) -> int:
    return session.scalar(select(func.count()).select_from(of).where(*conditions)) or 0


def open_incidents(session: Session, job_id: str) -> Sequence[IncidentRow]:
    """Return a job's unresolved incidents, worst first."""
    query = select(IncidentRow).where(IncidentRow.job_id == job_id, IncidentRow.state != "resolved")
    return session.scalars(
        query.order_by(
            IncidentRow.urgency.desc(), IncidentRow.opened_ns.desc(), IncidentRow.id.desc()
        )
    ).all()


def worst_open_incident(session: Session, job_id: str) -> IncidentRow | None:
    """Return a job's worst unresolved incident."""
    return next(iter(open_incidents(session, job_id)), None)


def problems_at_end(session: Session, job: JobRow) -> list[tuple[IncidentRow, Finding]]:
    """Return the incidents of a job that only its end has resolved, each with the worst of its
    findings that was not cleared; the worst first.

    Of information, only what all ranks waited for is a problem.
    """
    query = select(IncidentRow).where(
        IncidentRow.job_id == job.id,
        IncidentRow.state == "resolved",
        IncidentRow.opened_ns >= job.created_ns,  # a name may be that of earlier runs, too
    )
    problems = []
    for row in session.scalars(query.order_by(IncidentRow.opened_ns.desc()).limit(_MOST_AT_END)):
        lasting = [
            finding
            for finding in live_findings(row.view)
            if finding.generation == job.generation
            and (finding.severity != "info" or finding.kind == HANG.name)
        ]
        if lasting:
            problems.append((row, max(lasting, key=strength)))
    return sorted(problems, key=lambda each: urgency_of(each[1]), reverse=True)


def nodes_of(session: Session, job_id: str, since_ns: int) -> tuple[set[str], set[str]]:
    """Return the nodes with ranks of a job, and those that have sent nothing since `since_ns`."""
    query = (
        select(NodeRow.agent_id, NodeRow.last_seen_ns)
        .join(RankRow, NodeRow.agent_id == RankRow.agent_id)
        .where(RankRow.job_id == job_id)
        .distinct()
    )
    seen_ns = dict(session.execute(query).all())
    return set(seen_ns), {node for node, at_ns in seen_ns.items() if at_ns < since_ns}


def finished_ranks(session: Session, job_id: str) -> Sequence[RankRow]:
    """Return the ranks that ended with exit code 0, without being stopped."""
    query = select(RankRow).where(
        RankRow.job_id == job_id,
        RankRow.state == "exited",
        RankRow.commanded.is_(False),
        RankRow.exit_code == 0,
    )
    return session.scalars(query.order_by(RankRow.rank)).all()


def first_dead_rank(session: Session, job_id: str) -> RankRow | None:
    """Return the lowest rank that failed without being stopped."""
    query = select(RankRow).where(
        RankRow.job_id == job_id,
        RankRow.state == "exited",
        RankRow.commanded.is_(False),
        or_(RankRow.exit_code.is_(None), RankRow.exit_code != 0),
    )
    return session.scalar(query.order_by(RankRow.rank).limit(1))
