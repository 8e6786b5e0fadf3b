"""Writes what a look at a job led to. The caller has fenced the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, inspect, select, update
from sqlalchemy.orm import Session

from paceline_server.act.announce import ActionNotice, announce, incident_alert
from paceline_server.act.commands import act
from paceline_server.decide.types import Acknowledged, ActionView, Decision, IncidentView
from paceline_server.engine.types import Placement
from paceline_server.steps.types import StepSummary
from paceline_server.store import audit, models
from paceline_server.store.changes import record_change
from paceline_server.store.database import insert_into
from paceline_server.store.log import FINISHED
from paceline_server.store.shares import keep_step
from paceline_server.worker.ranks import SEEN, Ranks, placed
from paceline_server.worker.snapshot import Known

_RANK_KEYS = ("job_id", "rank")
_WRITTEN = (*_RANK_KEYS, *SEEN)
_CHANGE_RANK = (
    update(models.Rank.__table__)  # type: ignore[arg-type]  # is a Table
    .where(*(models.Rank.__table__.c[name] == bindparam(f"new_{name}") for name in _RANK_KEYS))
    .values({name: bindparam(f"new_{name}") for name in SEEN})
)


class ConflictError(Exception):
    """Somebody else changed what the decision was based on: decide again on what is true now."""


@dataclass(frozen=True)
class News:
    decision: Decision
    steps: list[StepSummary]
    acknowledged: list[Acknowledged]
    ranks: Ranks
    placement: Placement | None
    memory: bytes | None = None
    ranks_wait: bool = False  # how far they are is kept another time

    @property
    def matters(self) -> bool:
        """Whether it must not wait."""
        decision = self.decision
        return bool(
            self.steps
            or self.acknowledged
            or self.placement is not None
            or (not self.ranks_wait and self.ranks.changed_visibly())
            or decision.state
            or decision.incidents
            or decision.actions
            or decision.commands
            or decision.quarantine
            or decision.restarted
            or decision.audit
        )


@dataclass(frozen=True)
class Receivers:
    incidents: tuple[str, ...]
    actions: tuple[str, ...]


def keep(session: Session, known: Known, news: News, to: Receivers, now_ns: int) -> None:
    """Raises ConflictError; then nothing may be committed."""
    job, decision = known.job, news.decision
    over = job.state in FINISHED
    _keep_job(session, job)
    if news.memory is not None:
        _upsert(session, models.EngineMemory, {"job_id": job.id, "memory": news.memory})
    _keep_placement(session, known, news, over)
    _keep_incidents(session, known, decision, to.incidents, now_ns)
    _keep_actions(session, known, decision, to.actions, now_ns)
    act(session, job.id, decision, over, now_ns)
    _quarantine(session, decision)
    for summary in news.steps:
        keep_step(session, job.id, summary)
    session.flush()  # commands before the acknowledgements that name them
    _keep_acknowledgements(session, job, news.acknowledged)
    for entry in decision.audit:
        audit.record(session, job.id, entry, now_ns)
    _announce_changes(session, job.id, news)


# Columns that the API writes.
_NOT_OURS = {"id", "stop_requested"}


def _keep_job(session: Session, job: models.Job) -> None:
    names = [column.key for column in inspect(models.Job).columns if column.key not in _NOT_OURS]
    values = {name: getattr(job, name) for name in names}
    session.execute(update(models.Job).where(models.Job.id == job.id).values(values))


def _keep_placement(session: Session, known: Known, news: News, over: bool) -> None:
    job = known.job
    if over:
        _claim(session, job.id, set())
    if news.placement is None:
        if not news.ranks_wait:
            _keep_ranks(session, news.ranks.changed())
        return
    views = news.decision.ranks or []
    session.execute(delete(models.Rank).where(models.Rank.job_id == job.id))
    session.add_all(placed(job.id, job.generation, views))
    session.add(
        models.Generation(
            job_id=job.id,
            generation=job.generation,
            cursor=job.cursor,
            placement=news.placement,
            restarted=news.decision.restarted,
        )
    )
    _claim(session, job.id, {view.agent_id for view in views})


def _keep_ranks(session: Session, rows: list[dict[str, Any]]) -> None:
    """A large job has ten thousand that changed: given to the driver as they are.

    All columns are plain numbers and text, so there is nothing to convert on the way.
    """
    if not rows:
        return
    connection = session.connection()
    statement = _CHANGE_RANK.compile(dialect=connection.dialect)
    names = statement.positiontup  # None: the driver takes parameters by name
    if names is None:
        named = [{f"new_{name}": row[name] for name in _WRITTEN} for row in rows]
        connection.exec_driver_sql(str(statement), named)
    else:
        columns = itemgetter(*(name.removeprefix("new_") for name in names))
        connection.exec_driver_sql(str(statement), [columns(row) for row in rows])


def _claim(session: Session, job_id: str, agents: set[str]) -> None:
    """The job has these nodes and no others; a node has one job."""
    node = models.Node
    held = session.scalars(
        update(node)
        .where(node.job_id == job_id, node.agent_id.not_in(agents))
        .values(job_id=None)
        .returning(node.agent_id)
    ).all()
    _pass_on(session, held)
    taken = session.scalars(
        update(node)
        .where(node.agent_id.in_(agents), (node.job_id == job_id) | node.job_id.is_(None))
        .values(job_id=job_id)
        .returning(node.agent_id)
    ).all()
    if set(taken) != agents:
        raise ConflictError(f"another job has taken {sorted(agents - set(taken))}")
    for agent_id in {*held, *taken}:
        record_change(session, None, "node", agent_id)


def _pass_on(session: Session, agents: Sequence[str]) -> None:
    """Nodes on which others run a job beside the one that let them go: they are not free."""
    node, rank, job = models.Node, models.Rank, models.Job
    beside = (
        select(rank.agent_id, func.min(rank.job_id))
        .join(job, job.id == rank.job_id)
        .where(job.watched, job.state.not_in(FINISHED))
        .where(rank.agent_id.in_(agents), rank.state != "exited")
        .group_by(rank.agent_id)
    )
    for agent_id, job_id in session.execute(beside).all():
        free = update(node).where(node.agent_id == agent_id, node.job_id.is_(None))
        session.execute(free.values(job_id=job_id))


def _keep_incidents(
    session: Session, known: Known, decision: Decision, receivers: tuple[str, ...], now_ns: int
) -> None:
    job = known.job
    before = {incident.incident_id: incident for incident in known.incidents}
    for view in decision.incidents:
        _upsert(session, models.Incident, _incident_row(job.id, view))
        alert = incident_alert(job.id, job.name, before.get(view.incident_id), view)
        if alert is not None:
            announce(session, receivers, alert, view.incident_id, now_ns)


def _incident_row(job_id: str, view: IncidentView) -> dict[str, object]:
    return {
        "id": view.incident_id,
        "job_id": job_id,
        "kind": view.finding.kind,
        "severity": view.finding.severity,
        "state": view.state,
        "opened_ns": view.opened_ns,
        "resolved_ns": view.resolved_ns,
        "view": view,
    }


def _keep_actions(
    session: Session, known: Known, decision: Decision, receivers: tuple[str, ...], now_ns: int
) -> None:
    job = known.job
    before = {action.action_id: action for action in known.actions}
    for view in decision.actions:
        row = _action_row(job.id, view)
        version = known.versions.get(view.action_id)
        if version is None:
            session.execute(insert(models.Action).values(**row, version=1))
        else:
            _replace_action(session, row, version)
        was = before.get(view.action_id)
        if was is None or was.state != view.state:
            notice = ActionNotice(job_id=job.id, job_name=job.name, action=view)
            announce(session, receivers, notice, view.action_id, now_ns)
    seen = [action.action_id for action in known.actions if action.state == "rejected"]
    if seen:
        session.execute(
            update(models.Action).where(models.Action.id.in_(seen)).values(noticed=True)
        )


def _replace_action(session: Session, row: dict[str, object], version: int) -> None:
    action = models.Action
    replaced = session.scalar(
        update(action)
        .where(action.id == row["id"], action.version == version)
        .values(**row, version=version + 1)
        .returning(action.id)
    )
    if replaced is None:
        raise ConflictError(f"action {row['id']} was decided on meanwhile")


def _action_row(job_id: str, view: ActionView) -> dict[str, object]:
    restarts = view.kind == "restart" and view.state in ("running", "done")
    return {
        "id": view.action_id,
        "job_id": job_id,
        "incident_id": view.incident_id,
        "kind": view.kind,
        "state": view.state,
        "restart_of": view.generation if restarts else None,
        "created_ns": view.created_ns,
        "noticed": True,
        "view": view,
    }


def _quarantine(session: Session, decision: Decision) -> None:
    for agent_id, reason in decision.quarantine.items():
        session.execute(
            update(models.Node)
            .where(models.Node.agent_id == agent_id)
            .values(quarantine_reason=reason.replace("\0", ""))
        )
        record_change(session, None, "node", agent_id)


def _keep_acknowledgements(
    session: Session, job: models.Job, acknowledged: list[Acknowledged]
) -> None:
    final = {(each.command_id, each.rank): each for each in acknowledged}
    for each in final.values():
        _upsert(
            session,
            models.Acknowledgement,
            {
                "command_id": each.command_id,
                "rank": each.rank,
                "job_id": job.id,
                "generation": job.generation,
                "status": each.status,
                "step": each.step,
            },
        )


def _upsert(session: Session, table: type[models.Base], row: dict[str, object]) -> None:
    keys = [column.key for column in inspect(table).primary_key]
    rest = {name: value for name, value in row.items() if name not in keys}
    session.execute(
        insert_into(session, table)
        .values(**row)
        .on_conflict_do_update(index_elements=keys, set_=rest)
    )


def _announce_changes(session: Session, job_id: str, news: News) -> None:
    for summary in news.steps:
        record_change(session, job_id, "step", f"{job_id}/{summary.step}")
    for incident in news.decision.incidents:
        record_change(session, job_id, "incident", incident.incident_id)
    for action in news.decision.actions:
        record_change(session, job_id, "action", action.action_id)
    if news.placement is not None or (not news.ranks_wait and news.ranks.changed()):
        record_change(session, job_id, "ranks", job_id)
    record_change(session, job_id, "job", job_id)
