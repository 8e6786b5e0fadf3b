"""Stage 5 of a tick: write its result in one transaction, which the caller has fenced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

from msgspec.structs import replace
from sqlalchemy import bindparam, delete, func, insert, inspect, select, update
from sqlalchemy.orm import Session

from paceline_server.act.announce import (
    ActionNotice,
    IncidentReceiver,
    announce,
    incident_alerts,
)
from paceline_server.act.commands import act
from paceline_server.decide.incidents import urgency_value
from paceline_server.decide.types import Acknowledged, Decision, IncidentView
from paceline_server.engine.types import Placement
from paceline_server.lag import lag_seconds
from paceline_server.steps.types import StepSummary
from paceline_server.store import audit, launches, models, recoveries
from paceline_server.store.actions import action_columns
from paceline_server.store.changes import record_change, record_changes
from paceline_server.store.database import insert_into
from paceline_server.store.kept_logs import keep_last_steps
from paceline_server.store.log import FINISHED
from paceline_server.store.shares import insert_steps
from paceline_server.worker.ranks import CHANGING_COLUMNS, new_rank_rows
from paceline_server.worker.snapshot import JobColumns, Snapshot

_RANK_KEYS = ("job_id", "rank")
_RANK_COLUMNS = (*_RANK_KEYS, *CHANGING_COLUMNS)
_UPDATE_RANK = (
    update(models.RankRow.__table__)  # type: ignore[arg-type]  # is a Table
    .where(*(models.RankRow.__table__.c[name] == bindparam(f"new_{name}") for name in _RANK_KEYS))
    .values({name: bindparam(f"new_{name}") for name in CHANGING_COLUMNS})
)


class ConflictError(Exception):
    """Another process changed the data that the decision was based on.

    The caller must decide again.
    """


@dataclass(frozen=True, slots=True)
class AlertTargets:
    """The receivers of incidents, and the names of those of actions."""

    incidents: tuple[IncidentReceiver, ...]
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything that one tick writes."""

    columns: JobColumns
    decision: Decision
    steps: Sequence[StepSummary]
    acknowledged: Sequence[Acknowledged]
    placement: Placement | None  # placement of a new generation
    relocated: Placement | None  # new placement of the current generation, if its topology changed
    rank_rows: Sequence[dict[str, Any]] | None  # that changed; None: written at a later tick
    ranks_changed_visibly: bool  # more than how long an operation has been running
    engine_memory: bytes | None  # None: written at a later tick

    @property
    def is_urgent(self) -> bool:
        """Whether the commit has to be written at this tick."""
        decision = self.decision
        return bool(
            self.steps
            or self.acknowledged
            or self.placement is not None
            or self.relocated is not None
            or self.ranks_changed_visibly
            or decision.state
            or decision.incidents
            or decision.actions
            or decision.commands
            or decision.launch_requests
            or decision.quarantine
            or decision.restarted
            or decision.audit
        )


def write_commit(
    session: Session, snapshot: Snapshot, commit: Commit, targets: AlertTargets, now_ns: int
) -> None:
    """Write the commit. Raises ConflictError: the transaction must then be rolled back."""
    job_id, decision = snapshot.job_id, commit.decision
    over = commit.columns.state in FINISHED
    _update_job(session, job_id, commit.columns)
    if commit.engine_memory is not None:
        row: dict[str, object] = {
            "job_id": job_id,
            "memory": commit.engine_memory,
            "cursor": commit.columns.cursor,
        }
        _upsert(session, models.EngineMemoryRow, row)
    if over:
        _claim_nodes(session, job_id, set())
    if commit.placement is not None:
        _insert_generation(session, job_id, commit, commit.placement)
    elif commit.rank_rows:
        _update_ranks(session, commit.rank_rows)
    if commit.relocated is not None:
        _relocate(session, job_id, commit.relocated)
    ticked_ns = commit.columns.ticked_ns
    lag = None if ticked_ns is None else lag_seconds(ticked_ns, now_ns)
    write_incidents(
        session,
        job_id,
        snapshot.job_name,
        snapshot.incidents,
        decision.incidents,
        targets.incidents,
        now_ns,
        lag,
    )
    if over:
        _rank_behind_live_jobs(session, job_id)
        _check_actions(session, snapshot, decision)
    _write_actions(session, snapshot, decision, targets.actions, now_ns, lag)
    launcher = None if snapshot.launch is None else snapshot.launch.launcher
    recoveries.record(session, job_id, decision.actions, launcher)
    _withdraw_launches(session, decision, now_ns)
    act(session, job_id, decision, over, now_ns)
    _quarantine(session, decision)
    insert_steps(session, job_id, commit.steps)
    session.flush()  # commands before the acknowledgements that name them
    if over and snapshot.columns.state not in FINISHED:
        keep_last_steps(session, job_id, commit.columns.generation, now_ns)
    _write_acknowledgements(session, job_id, commit)
    for entry in decision.audit:
        audit.record(session, job_id, entry, now_ns)
    _record_changes(session, job_id, commit)


def _update_job(session: Session, job_id: str, columns: JobColumns) -> None:
    values = {field.name: getattr(columns, field.name) for field in fields(columns)}
    session.execute(update(models.JobRow).where(models.JobRow.id == job_id).values(values))


def _insert_generation(session: Session, job_id: str, commit: Commit, placement: Placement) -> None:
    views = commit.decision.ranks or []
    session.execute(delete(models.RankRow).where(models.RankRow.job_id == job_id))
    session.add_all(new_rank_rows(job_id, placement.generation, views))
    session.add(
        models.GenerationRow(
            job_id=job_id,
            generation=placement.generation,
            cursor=commit.columns.cursor,
            placement=placement,
            restarted=commit.decision.restarted,
        )
    )
    _claim_nodes(session, job_id, {view.agent_id for view in views})


def _relocate(session: Session, job_id: str, placement: Placement) -> None:
    row = models.GenerationRow
    is_current = row.job_id == job_id, row.generation == placement.generation
    session.execute(update(row).where(*is_current).values(placement=placement))


def _update_ranks(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Update the rows directly through the driver, because a large job has ten thousand changed
    ones.

    All columns are plain numbers and text, so there is nothing to convert.
    """
    connection = session.connection()
    statement = _UPDATE_RANK.compile(dialect=connection.dialect)
    names = statement.positiontup  # None: the driver takes parameters by name
    if names is None:
        named = [{f"new_{name}": row[name] for name in _RANK_COLUMNS} for row in rows]
        connection.exec_driver_sql(str(statement), named)
    else:
        columns = itemgetter(*(name.removeprefix("new_") for name in names))
        connection.exec_driver_sql(str(statement), [columns(row) for row in rows])


def _claim_nodes(session: Session, job_id: str, agents: set[str]) -> None:
    """Assign exactly these nodes to the job. A node has one job."""
    node = models.NodeRow
    freed = session.scalars(
        update(node)
        .where(node.job_id == job_id, node.agent_id.not_in(agents))
        .values(job_id=None)
        .returning(node.agent_id)
    ).all()
    _reassign_watched(session, freed)
    taken = session.scalars(
        update(node)
        .where(node.agent_id.in_(agents), (node.job_id == job_id) | node.job_id.is_(None))
        .values(job_id=job_id)
        .returning(node.agent_id)
    ).all()
    if set(taken) != agents:
        raise ConflictError(f"another job has taken {sorted(agents - set(taken))}")
    record_changes(session, None, "node", sorted({*freed, *taken}))


def _reassign_watched(session: Session, agents: Sequence[str]) -> None:
    """Assign freed nodes that also run ranks of an external job to that job."""
    if not agents:
        return
    node, rank, job = models.NodeRow, models.RankRow, models.JobRow
    watched = (
        select(rank.agent_id, func.min(rank.job_id))
        .join(job, job.id == rank.job_id)
        .where(job.watched, job.state.not_in(FINISHED))
        .where(rank.agent_id.in_(agents), rank.state != "exited")
        .group_by(rank.agent_id)
    )
    for agent_id, job_id in session.execute(watched).all():
        free = update(node).where(node.agent_id == agent_id, node.job_id.is_(None))
        session.execute(free.values(job_id=job_id))


def write_incidents(
    session: Session,
    job_id: str,
    job_name: str,
    before: Iterable[IncidentView],
    after: Iterable[IncidentView],
    receivers: Iterable[IncidentReceiver],
    now_ns: int,
    lag: float | None = None,
) -> None:
    """Write the incidents of a job, and the alerts about their changes.

    Args:
        before: the unresolved incidents as stored.
        after: the incidents that are new or changed.
        lag: seconds that the analysis is behind; None if the incidents are not from the analysis.
    """
    known = {incident.incident_id: incident for incident in before}
    for view in sorted(after, key=urgency_value, reverse=True):
        _upsert(session, models.IncidentRow, _incident_row(job_id, view))
        stored = known.get(view.incident_id)
        for receiver in receivers:
            minimum = receiver.minimum_severity
            for alert in incident_alerts(job_id, job_name, stored, view, minimum):
                alert = replace(alert, lag_seconds=lag)
                announce(session, (receiver.name,), alert, view.incident_id, now_ns)


def _rank_behind_live_jobs(session: Session, job_id: str) -> None:
    """Have the incidents of an ended job come after those of other jobs, before resolved ones."""
    row = models.IncidentRow
    unresolved = update(row).where(row.job_id == job_id, row.state != "resolved")
    session.execute(unresolved.values(urgency=row.urgency / 100 - 0.9))


def _incident_row(job_id: str, view: IncidentView) -> dict[str, object]:
    return {
        "id": view.incident_id,
        "job_id": job_id,
        "kind": view.finding.kind,
        "severity": view.finding.severity,
        "state": view.state,
        "urgency": urgency_value(view),
        "opened_ns": view.opened_ns,
        "resolved_ns": view.resolved_ns,
        "view": view,
    }


def _write_actions(
    session: Session,
    snapshot: Snapshot,
    decision: Decision,
    receivers: tuple[str, ...],
    now_ns: int,
    lag: float | None,
) -> None:
    before = {action.action_id: action for action in snapshot.actions}
    for view in decision.actions:
        row = action_columns(snapshot.job_id, view)
        version = snapshot.action_versions.get(view.action_id)
        if version is None:
            session.execute(insert(models.ActionRow).values(**row, version=1))
        else:
            _replace_action(session, row, version)
        previous = before.get(view.action_id)
        if previous is None or previous.state != view.state:
            notice = ActionNotice(
                job_id=snapshot.job_id,
                job_name=snapshot.job_name,
                action=view,
                lag_seconds=lag,
            )
            announce(session, receivers, notice, view.action_id, now_ns)
    rejected = [action.action_id for action in snapshot.actions if action.state == "rejected"]
    if rejected:
        session.execute(
            update(models.ActionRow).where(models.ActionRow.id.in_(rejected)).values(noticed=True)
        )


def _check_actions(session: Session, snapshot: Snapshot, decision: Decision) -> None:
    """Raise ConflictError if a person requested an action since the snapshot of a job that ends.

    It would be left to the next run of that name.
    """
    known = {*snapshot.action_versions, *(view.action_id for view in decision.actions)}
    row = models.ActionRow
    stored = session.scalars(
        select(row.id).where(row.job_id == snapshot.job_id, row.state == "approved")
    )
    if unknown := set(stored) - known:
        raise ConflictError(f"action {min(unknown)} was requested meanwhile")


def _replace_action(session: Session, row: dict[str, object], version: int) -> None:
    action = models.ActionRow
    replaced = session.scalar(
        update(action)
        .where(action.id == row["id"], action.version == version)
        .values(**row, version=version + 1)
        .returning(action.id)
    )
    if replaced is None:
        raise ConflictError(f"action {row['id']} was approved or rejected meanwhile")


def _withdraw_launches(session: Session, decision: Decision, now_ns: int) -> None:
    for action_id in decision.withdrawn_launches:
        if not launches.withdraw(session, action_id, now_ns):
            raise ConflictError(f"the restart of action {action_id} has begun meanwhile")


def _quarantine(session: Session, decision: Decision) -> None:
    for agent_id, reason in decision.quarantine.items():
        session.execute(
            update(models.NodeRow)
            .where(models.NodeRow.agent_id == agent_id)
            .values(quarantine_reason=reason.replace("\0", ""))
        )
    record_changes(session, None, "node", list(decision.quarantine))


def _write_acknowledgements(session: Session, job_id: str, commit: Commit) -> None:
    last = {(result.command_id, result.rank): result for result in commit.acknowledged}
    for result in last.values():
        _upsert(
            session,
            models.AcknowledgementRow,
            {
                "command_id": result.command_id,
                "rank": result.rank,
                "job_id": job_id,
                "generation": commit.columns.generation,
                "status": result.status,
                "step": result.step,
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


def _record_changes(session: Session, job_id: str, commit: Commit) -> None:
    decision = commit.decision
    steps = [f"{job_id}/{summary.step}" for summary in commit.steps]
    record_changes(session, job_id, "step", steps)
    incidents = [incident.incident_id for incident in decision.incidents]
    record_changes(session, job_id, "incident", incidents)
    record_changes(session, job_id, "action", [action.action_id for action in decision.actions])
    if commit.placement is not None or commit.relocated is not None or commit.rank_rows:
        record_change(session, job_id, "ranks", job_id)
    record_change(session, job_id, "job", job_id)
