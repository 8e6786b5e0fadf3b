"""Stage 1 of a tick: the job's state and the new batches, read in one consistent transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from sqlalchemy import Text, and_, or_, select, type_coerce
from sqlalchemy.orm import Session

from paceline_server.decide.types import (
    Acknowledged,
    ActionView,
    Experience,
    FailureHistory,
    IncidentView,
    JobSpec,
    JobState,
    LaunchKind,
    LaunchResult,
    NodeView,
    Restarted,
)
from paceline_server.engine.types import Launch
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger
from paceline_server.store import attachments, launches, models
from paceline_server.store.log import read_log_part
from paceline_server.store.queries import failure_history, usable_launch
from paceline_server.worker.acknowledgements import genuine_acknowledgements
from paceline_wire import batch as wire
from paceline_wire.batch import AgentHello, Batch
from paceline_wire.topology import Topology


@dataclass(frozen=True, slots=True)
class JobColumns:
    """The columns of a job's row that a tick may change."""

    spec: JobSpec
    state: JobState
    generation: int
    topology: Topology
    started_ns: int | None
    finished_ns: int | None
    cursor: int  # id of the last log entry that the row reflects
    ticked_ns: int | None
    step: int | None
    highest_step: int | None
    checkpoint_step: int | None
    can_checkpoint: bool | None
    experience: Experience
    step_seconds: float | None
    loss: float | None
    evaluation_loss: float | None
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """One entry of the hot log, decoded."""

    log_id: int
    batch: Batch
    received_ns: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a tick reads from the database. No stage changes it."""

    job_id: str
    job_name: str
    policy: Policy
    policy_version: int | None
    stop_requested: bool
    is_superseded: bool  # another run of an external job has replaced this one
    columns: JobColumns
    log: tuple[ReceivedBatch, ...]
    behind: bool  # whether the log has more entries than `log`
    nodes: tuple[NodeView, ...]
    incidents: tuple[IncidentView, ...]
    actions: tuple[ActionView, ...]
    action_versions: Mapping[str, int]  # by id of `actions`
    restarts: tuple[Restarted, ...]
    acknowledged: tuple[Acknowledged, ...]  # stored before this tick
    new_acknowledged: tuple[Acknowledged, ...]  # contained in `log`
    command_results: Mapping[int, bool]
    command_errors: Mapping[int, str]  # why those that failed did
    fleet: FailureHistory | None  # None: not read in this tick
    is_external: bool
    launch: Launch | None  # the launcher that owns an external job
    launch_results: Mapping[tuple[str, LaunchKind], LaunchResult]


def load_snapshot(
    session: Session,
    job_id: str,
    cursor: int,
    batches: int,
    batch_bytes: int,
    fleet_since_ns: int | None = None,
) -> Snapshot:
    """Read the job's state, and at most `batches` log entries of `batch_bytes` after `cursor`.

    With `fleet_since_ns` also the failures of the fleet since then.
    """
    job = session.get_one(models.JobRow, job_id)
    entries, behind = read_log_part(session, cursor, batches, batch_bytes)
    log = tuple(
        ReceivedBatch(entry.id, wire.decode(entry.payload), entry.received_ns) for entry in entries
    )
    actions = session.scalars(
        select(models.ActionRow)
        .where(
            models.ActionRow.job_id == job_id,
            or_(
                models.ActionRow.state.in_(("proposed", "approved", "running")),
                and_(models.ActionRow.state == "rejected", ~models.ActionRow.noticed),
            ),
        )
        .order_by(models.ActionRow.created_ns, models.ActionRow.id)
    ).all()
    action_ids = [row.id for row in actions]
    results, errors = _command_results(session, action_ids)
    events = (event for received in log for event in received.batch.events)
    return Snapshot(
        job_id=job.id,
        job_name=job.name,
        policy=job.policy,
        policy_version=job.policy_version,
        stop_requested=job.stop_requested,
        is_superseded=job.watched and not behind and attachments.is_superseded(session, job),
        columns=_columns(job),
        log=log,
        behind=behind,
        nodes=_nodes(session),
        incidents=load_incidents(session, job_id),
        actions=tuple(row.view for row in actions),
        action_versions={row.id: row.version for row in actions},
        restarts=_restarts(session, job_id),
        acknowledged=_acknowledged(session, action_ids),
        new_acknowledged=genuine_acknowledgements(session, job.id, job.generation, events),
        command_results=results,
        command_errors=errors,
        fleet=None if fleet_since_ns is None else failure_history(session, fleet_since_ns),
        is_external=job.watched,
        launch=usable_launch(
            session, job, is_repairing=any(row.state == "running" for row in actions)
        ),
        launch_results=launches.results(session, action_ids) if job.watched else {},
    )


def _columns(job: models.JobRow) -> JobColumns:
    return JobColumns(
        spec=job.spec,
        state=job.state,  # type: ignore[arg-type]  # only `decide` sets it
        generation=job.generation,
        topology=job.topology,
        started_ns=job.started_ns,
        finished_ns=job.finished_ns,
        cursor=job.cursor,
        ticked_ns=job.ticked_ns,
        step=job.step,
        highest_step=job.highest_step,
        checkpoint_step=job.checkpoint_step,
        can_checkpoint=job.can_checkpoint,
        experience=job.experience or Experience(),
        step_seconds=job.step_seconds,
        loss=job.loss,
        evaluation_loss=job.evaluation_loss,
        ledger=job.ledger,
    )


def _nodes(session: Session) -> tuple[NodeView, ...]:
    """Return all nodes that have sent a hello; others cannot be used."""
    rows = session.execute(
        select(
            models.NodeRow.agent_id,
            type_coerce(models.NodeRow.hello, Text),
            models.NodeRow.last_seen_ns,
            models.NodeRow.boot_id,
            models.NodeRow.quarantine_reason,
            models.NodeRow.job_id,
        )
        .where(models.NodeRow.hello.is_not(None))
        .order_by(models.NodeRow.agent_id)
    )
    return tuple(_node(*row) for row in rows)


@lru_cache(maxsize=1 << 13)
def _node(
    agent_id: str,
    hello_text: str,
    last_seen_ns: int,
    boot_id: str,
    quarantine_reason: str | None,
    job_id: str | None,
) -> NodeView:
    """Return a node.

    Cached, because each tick reads all nodes and few of a thousand have changed.
    """
    hello = _hello(hello_text)
    return NodeView(
        agent_id=agent_id,
        address=hello.address,
        rendezvous_port=hello.rendezvous_port,
        slots=hello.slots,
        gpus=[gpu.index for gpu in hello.gpus if gpu.trouble is None],
        is_degraded=any(gpu.trouble is not None for gpu in hello.gpus),
        last_seen_ns=last_seen_ns,
        boot_id=boot_id,
        quarantined=quarantine_reason is not None,
        job=job_id,
    )


_hello_decoder = msgspec.json.Decoder(AgentHello)


@lru_cache(maxsize=1 << 13)
def _hello(text: str) -> AgentHello:
    return _hello_decoder.decode(text)


def load_incidents(session: Session, job_id: str) -> tuple[IncidentView, ...]:
    """Return the job's unresolved incidents, the oldest first."""
    query = (
        select(models.IncidentRow.view)
        .where(models.IncidentRow.job_id == job_id, models.IncidentRow.state != "resolved")
        .order_by(models.IncidentRow.opened_ns, models.IncidentRow.id)
    )
    return tuple(session.scalars(query))


def _restarts(session: Session, job_id: str) -> tuple[Restarted, ...]:
    query = (
        select(models.GenerationRow.restarted)
        .where(models.GenerationRow.job_id == job_id)
        .order_by(models.GenerationRow.generation)
    )
    return tuple(restarted for restarted in session.scalars(query) if restarted is not None)


def _acknowledged(session: Session, action_ids: list[str]) -> tuple[Acknowledged, ...]:
    if not action_ids:
        return ()
    query = (
        select(models.AcknowledgementRow)
        .join(models.CommandRow, models.CommandRow.id == models.AcknowledgementRow.command_id)
        .where(models.CommandRow.action_id.in_(action_ids))
        .order_by(models.AcknowledgementRow.command_id, models.AcknowledgementRow.rank)
    )
    return tuple(
        Acknowledged(row.rank, row.command_id, row.status, row.step)
        for row in session.scalars(query)
    )


def _command_results(
    session: Session, action_ids: list[str]
) -> tuple[dict[int, bool], dict[int, str]]:
    """Return whether each finished command succeeded, and why those that failed did."""
    if not action_ids:
        return {}, {}
    row = models.CommandRow
    query = select(row.id, row.ok, row.detail).where(
        row.action_id.in_(action_ids), row.finished_ns.is_not(None)
    )
    finished = session.execute(query).all()
    results = {command_id: bool(ok) for command_id, ok, _ in finished}
    return results, {command_id: detail for command_id, ok, detail in finished if not ok and detail}
