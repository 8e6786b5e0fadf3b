"""What `decide` may look at, read in one consistent moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec
from sqlalchemy import Text, and_, or_, select, type_coerce
from sqlalchemy.orm import Session

from paceline_server.decide.types import (
    Acknowledged,
    ActionView,
    IncidentView,
    JobView,
    NodeView,
    RankView,
    Restarted,
)
from paceline_server.store import attachments
from paceline_server.store.log import read_log_part
from paceline_server.store.models import (
    Acknowledgement,
    Action,
    CommandRow,
    Generation,
    HotLog,
    Incident,
    Job,
    Node,
)
from paceline_wire.batch import AgentHello


@dataclass(frozen=True)
class Known:
    """Rows as of the beginning of a tick. `versions` are those of `actions`, by id."""

    job: Job
    log: list[HotLog]
    behind: bool  # there is more of it
    nodes: list[NodeView]
    incidents: list[IncidentView]
    actions: list[ActionView]
    versions: dict[str, int]
    restarts: list[Restarted]
    acknowledged: list[Acknowledged]
    command_results: dict[int, bool]
    is_superseded: bool

    def view(self, job: Job, ranks: list[RankView], acknowledged: list[Acknowledged]) -> JobView:
        return JobView(
            job_id=job.id,
            spec=job.spec,
            state=job.state,  # type: ignore[arg-type]  # only `decide` sets it
            generation=job.generation,
            topology=job.topology,
            ranks=ranks,
            nodes=self.nodes,
            incidents=self.incidents,
            actions=self.actions,
            restarts=self.restarts,
            acknowledged=acknowledged,
            command_results=self.command_results,
            highest_step=job.highest_step,
            checkpoint_step=job.checkpoint_step,
            step_seconds=job.step_seconds,
            stop_requested=job.stop_requested,
            is_superseded=self.is_superseded,
        )


def know(session: Session, job_id: str, cursor: int, batches: int, batch_bytes: int) -> Known:
    job = session.get_one(Job, job_id)
    log, behind = read_log_part(session, cursor, batches, batch_bytes)
    actions = session.scalars(
        select(Action)
        .where(
            Action.job_id == job_id,
            or_(
                Action.state.in_(("proposed", "approved", "running")),
                and_(Action.state == "rejected", ~Action.noticed),
            ),
        )
        .order_by(Action.created_ns, Action.id)
    ).all()
    return Known(
        job=job,
        log=log,
        behind=behind,
        nodes=_nodes(session),
        incidents=_incidents(session, job_id),
        actions=[row.view for row in actions],
        versions={row.id: row.version for row in actions},
        restarts=_restarts(session, job_id),
        acknowledged=_acknowledged(session, [row.id for row in actions]),
        command_results=_results(session, [row.id for row in actions]),
        is_superseded=job.watched and not behind and attachments.is_superseded(session, job),
    )


def _nodes(session: Session) -> list[NodeView]:
    """A node that has not said yet who it is cannot be used."""
    rows = session.execute(
        select(
            Node.agent_id,
            type_coerce(Node.hello, Text),
            Node.last_seen_ns,
            Node.boot_id,
            Node.quarantine_reason,
            Node.job_id,
        )
        .where(Node.hello.is_not(None))
        .order_by(Node.agent_id)
    )
    return [_node(*row) for row in rows]


@lru_cache(maxsize=1 << 13)
def _node(
    agent_id: str,
    hello: str,
    last_seen_ns: int,
    boot_id: str,
    quarantine_reason: str | None,
    job_id: str | None,
) -> NodeView:
    """All are asked for at each look, and of a thousand few have spoken since the last one."""
    said = _hello(hello)
    return NodeView(
        agent_id=agent_id,
        address=said.address,
        rendezvous_port=said.rendezvous_port,
        slots=said.slots,
        gpus=[gpu.index for gpu in said.gpus if gpu.trouble is None],
        is_degraded=any(gpu.trouble is not None for gpu in said.gpus),
        last_seen_ns=last_seen_ns,
        boot_id=boot_id,
        quarantined=quarantine_reason is not None,
        job=job_id,
    )


_hello_decoder = msgspec.json.Decoder(AgentHello)


@lru_cache(maxsize=1 << 13)
def _hello(text: str) -> AgentHello:
    return _hello_decoder.decode(text)


def _incidents(session: Session, job_id: str) -> list[IncidentView]:
    query = (
        select(Incident.view)
        .where(Incident.job_id == job_id, Incident.state != "resolved")
        .order_by(Incident.opened_ns, Incident.id)
    )
    return list(session.scalars(query))


def _restarts(session: Session, job_id: str) -> list[Restarted]:
    query = (
        select(Generation.restarted)
        .where(Generation.job_id == job_id)
        .order_by(Generation.generation)
    )
    return [restarted for restarted in session.scalars(query) if restarted is not None]


def _acknowledged(session: Session, action_ids: list[str]) -> list[Acknowledged]:
    if not action_ids:
        return []
    query = (
        select(Acknowledgement)
        .join(CommandRow, CommandRow.id == Acknowledgement.command_id)
        .where(CommandRow.action_id.in_(action_ids))
        .order_by(Acknowledgement.command_id, Acknowledgement.rank)
    )
    return [
        Acknowledged(row.rank, row.command_id, row.status, row.step)
        for row in session.scalars(query)
    ]


def _results(session: Session, action_ids: list[str]) -> dict[int, bool]:
    if not action_ids:
        return {}
    query = select(CommandRow.id, CommandRow.ok).where(
        CommandRow.action_id.in_(action_ids), CommandRow.finished_ns.is_not(None)
    )
    return {command_id: bool(ok) for command_id, ok in session.execute(query)}
