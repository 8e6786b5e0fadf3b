"""Commands as rows. A command is sent to its agent until its result is stored."""

from __future__ import annotations

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from paceline_server.decide.types import IssuedCommand
from paceline_server.store import queries
from paceline_server.store.models import (
    AcknowledgementRow,
    ActionRow,
    CommandRow,
    CounterRow,
    JobRow,
    NodeRow,
)
from paceline_wire.batch import CommandResult
from paceline_wire.commands import Burst, Ping, TakeDumps, TakeProfiles, TakeStacks

_COUNTER = "command"


def reserve_command_ids(session: Session, count: int) -> range:
    """Reserve `count` unique ids, the first is 1. Unused ids are skipped, which is harmless."""
    end = session.scalar(
        update(CounterRow)
        .where(CounterRow.name == _COUNTER)
        .values(value=CounterRow.value + count)
        .returning(CounterRow.value)
    )
    assert end is not None, "the first migration creates the counter"
    return range(end - count + 1, end + 1)


def issue(session: Session, job_id: str, issued: IssuedCommand, now_ns: int) -> None:
    """Store a command for delivery to its agent."""
    command = issued.command
    assert not isinstance(command, Burst | Ping), "bursts and pings have no generation"
    if isinstance(command, TakeStacks | TakeProfiles | TakeDumps):
        issued = msgspec.structs.replace(
            issued, command=_with_reported_generation(session, job_id, command)
        )
    _add(session, job_id, issued, command.generation, now_ns)


def _with_reported_generation(
    session: Session, job_id: str, command: TakeStacks | TakeProfiles | TakeDumps
) -> TakeStacks | TakeProfiles | TakeDumps:
    """Use the generation that the ranks report; ranks of one node report the same number."""
    reported = queries.reported_generations(session, session.get_one(JobRow, job_id))
    generation = reported.get(command.ranks[0], command.generation)
    return msgspec.structs.replace(command, generation=generation)


def request_burst(
    session: Session, node: NodeRow, collectors: list[str], seconds: float, now_ns: int
) -> None:
    """Request ten collections per second from an agent. The node must have ranks of a job."""
    assert node.job_id is not None
    job = session.get_one(JobRow, node.job_id)
    (command_id,) = reserve_command_ids(session, 1)
    command = Burst(command_id=command_id, collectors=collectors, seconds=seconds)
    issued = IssuedCommand(agent_id=node.agent_id, action_id="", command=command)
    _add(session, job.id, issued, job.generation, now_ns)


def _add(
    session: Session, job_id: str, issued: IssuedCommand, generation: int, now_ns: int
) -> None:
    fields = msgspec.to_builtins(issued.command)
    session.add(
        CommandRow(
            id=fields["command_id"],
            job_id=job_id,
            agent_id=issued.agent_id,
            action_id=issued.action_id,
            kind=fields["type"],
            generation=generation,
            created_ns=now_ns,
            body=msgspec.json.encode(issued.command).decode(),
        )
    )


def finish_command(session: Session, agent_id: str, result: CommandResult, now_ns: int) -> None:
    """Store the result of a command. Ignore results of other agents and repeated results."""
    session.execute(
        update(CommandRow)
        .where(
            CommandRow.id == result.command_id,
            CommandRow.agent_id == agent_id,
            CommandRow.finished_ns.is_(None),
        )
        .values(finished_ns=now_ns, ok=result.ok, detail=result.detail.replace("\0", "")[:2000])
    )


def withdraw(session: Session, job_id: str, before_generation: int | None, now_ns: int) -> None:
    """Mark unfinished commands of earlier generations as superseded.

    Stop commands stay: an agent that reconnects late must still kill its running ranks.
    `before_generation` None: the job has ended, withdraw all.
    """
    statement = update(CommandRow).where(
        CommandRow.job_id == job_id,
        CommandRow.finished_ns.is_(None),
        CommandRow.kind != "stop_generation",
    )
    if before_generation is not None:
        statement = statement.where(CommandRow.generation < before_generation)
    session.execute(statement.values(finished_ns=now_ns, ok=False, detail="superseded"))


def prune_commands(session: Session, before_ns: int) -> None:
    """Delete commands that finished before `before_ns`, except those of running actions."""
    running = select(ActionRow.id).where(ActionRow.state == "running")
    old = select(CommandRow.id).where(
        CommandRow.finished_ns < before_ns, CommandRow.action_id.not_in(running)
    )
    session.execute(delete(AcknowledgementRow).where(AcknowledgementRow.command_id.in_(old)))
    session.execute(delete(CommandRow).where(CommandRow.id.in_(old)))


def unfinished_commands(session: Session) -> dict[str, list[tuple[int, str]]]:
    """Return (id, body) of unfinished commands by agent id, in the order of issue."""
    query = (
        select(CommandRow.agent_id, CommandRow.id, CommandRow.body)
        .where(CommandRow.finished_ns.is_(None))
        .order_by(CommandRow.id)
    )
    found: dict[str, list[tuple[int, str]]] = {}
    for row in session.execute(query):
        found.setdefault(row.agent_id, []).append((row.id, row.body))
    return found
