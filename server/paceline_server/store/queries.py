"""What the API reads. Lists are newest first, a page at a time after a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from paceline_server.store.log import FINISHED
from paceline_server.store.models import (
    Action,
    AuditRow,
    Base,
    Generation,
    Incident,
    Job,
    Node,
    Rank,
    Step,
)

_Row = TypeVar("_Row", Job, Incident, Action)


def newest_first(
    query: Select[_Row],
    at_ns: InstrumentedAttribute[int],
    identifier: InstrumentedAttribute[str],
    after: tuple[int, str] | None,
) -> Select[_Row]:
    if after is not None:
        earlier = and_(at_ns == after[0], identifier < after[1])
        query = query.where(or_(at_ns < after[0], earlier))
    return query.order_by(at_ns.desc(), identifier.desc())


def jobs(session: Session, limit: int, after: tuple[int, str] | None) -> Sequence[Job]:
    query = newest_first(select(Job), Job.created_ns, Job.id, after)
    return session.scalars(query.limit(limit)).all()


def incidents(
    session: Session,
    limit: int,
    after: tuple[int, str] | None = None,
    job_id: str | None = None,
    state: str | None = None,
) -> Sequence[Incident]:
    query = select(Incident).where(*_equal((Incident.job_id, job_id), (Incident.state, state)))
    query = newest_first(query, Incident.opened_ns, Incident.id, after)
    return session.scalars(query.limit(limit)).all()


def actions(
    session: Session,
    limit: int,
    after: tuple[int, str] | None = None,
    job_id: str | None = None,
    state: str | None = None,
) -> Sequence[Action]:
    query = select(Action).where(*_equal((Action.job_id, job_id), (Action.state, state)))
    query = newest_first(query, Action.created_ns, Action.id, after)
    return session.scalars(query.limit(limit)).all()


def newest_action(session: Session, job_id: str, kind: str) -> Action | None:
    query = select(Action).where(Action.job_id == job_id, Action.kind == kind)
    return session.scalar(query.order_by(Action.created_ns.desc(), Action.id.desc()).limit(1))


def _equal(*wanted: tuple[Any, str | None]) -> list[ColumnElement[bool]]:
    return [column == value for column, value in wanted if value is not None]


def audit(
    session: Session, limit: int, before: int | None, job_id: str | None
) -> Sequence[AuditRow]:
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditRow.id < before)
    if job_id is not None:
        query = query.where(AuditRow.job_id == job_id)
    return session.scalars(query).all()


def ranks(session: Session, job_id: str) -> Sequence[Rank]:
    return session.scalars(select(Rank).where(Rank.job_id == job_id).order_by(Rank.rank)).all()


def said(session: Session, job: Job) -> dict[int, int]:
    """`Placement.said` of the current generation; of a job that we started nothing."""
    generation = session.get(Generation, (job.id, job.generation)) if job.watched else None
    return {} if generation is None else generation.placement.said


def rank_states(session: Session, job_id: str) -> dict[str, int]:
    """How many ranks are in each state."""
    query = select(Rank.state, func.count()).where(Rank.job_id == job_id).group_by(Rank.state)
    return dict(session.execute(query).all())


def nodes(session: Session, limit: int, after: str | None) -> Sequence[Node]:
    query = select(Node).order_by(Node.agent_id).limit(limit)
    if after is not None:
        query = query.where(Node.agent_id > after)
    return session.scalars(query).all()


def ranks_on(session: Session, agent_id: str) -> dict[str, list[int]]:
    """By job, the oldest first, of those that are not over."""
    query = (
        select(Rank.job_id, Rank.rank)
        .join(Job, Job.id == Rank.job_id)
        .where(Rank.agent_id == agent_id, Job.state.not_in(FINISHED))
        .order_by(Job.created_ns, Rank.job_id, Rank.rank)
    )
    found: dict[str, list[int]] = {}
    for job_id, rank in session.execute(query):
        found.setdefault(job_id, []).append(rank)
    return found


def steps(
    session: Session, job_id: str, after: int | None, limit: int, generation: int | None = None
) -> Sequence[Step]:
    """Ascending; without `after` the newest. A step that was done again shows its newest run."""
    newer = aliased(Step)
    done_again = (
        select(newer.step)
        .where(
            newer.job_id == Step.job_id,
            newer.step == Step.step,
            newer.generation > Step.generation,
        )
        .exists()
    )
    query = select(Step).where(Step.job_id == job_id, ~done_again)
    if generation is not None:
        query = query.where(Step.generation == generation)
    if after is not None:
        return session.scalars(
            query.where(Step.step > after).order_by(Step.step).limit(limit)
        ).all()
    newest = session.scalars(
        query.order_by(Step.generation.desc(), Step.step.desc()).limit(limit)
    ).all()
    return sorted(newest, key=lambda row: row.step)


def step(session: Session, job_id: str, number: int) -> Step | None:
    query = select(Step).where(Step.job_id == job_id, Step.step == number)
    return session.scalar(query.order_by(Step.generation.desc()).limit(1))


def count_restarts(session: Session, job_id: str) -> int:
    return _count(
        session, Generation.job_id == job_id, Generation.restarted.is_not(None), of=Generation
    )


def count_open_incidents(session: Session, job_id: str) -> int:
    return _count(session, Incident.job_id == job_id, Incident.state != "resolved", of=Incident)


def count_pending_actions(session: Session, job_id: str) -> int:
    return _count(session, Action.job_id == job_id, Action.state == "proposed", of=Action)


def _count(session: Session, *conditions: ColumnElement[bool], of: type[Base]) -> int:
    return session.scalar(select(func.count()).select_from(of).where(*conditions)) or 0


def newest_open_incident(session: Session, job_id: str) -> Incident | None:
    query = select(Incident).where(Incident.job_id == job_id, Incident.state != "resolved")
    return session.scalar(query.order_by(Incident.opened_ns.desc(), Incident.id.desc()).limit(1))
