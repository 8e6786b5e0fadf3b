"""Commands as rows: an agent is asked again until its result is stored."""

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
from paceline_wire.commands import Burst, Ping, TakeDumps, TakeStacks

_COUNTER = "command"


def reserve_command_ids(session: Session, count: int) -> range:
    """Ids that nobody else gets, from 1. An unused rest is lost, which does no harm."""
    end = session.scalar(
        update(CounterRow)
        .where(CounterRow.name == _COUNTER)
        .values(value=CounterRow.value + count)
        .returning(CounterRow.value)
    )
    assert end is not None, "the first migration makes the counter"
    return range(end - count + 1, end + 1)


def issue(session: Session, job_id: str, issued: IssuedCommand, now_ns: int) -> None:
    command = issued.command
    assert not isinstance(command, Burst | Ping), "only a command of a generation is issued"
    if isinstance(command, TakeStacks | TakeDumps):
        issued = msgspec.structs.replace(issued, command=_as_ranks_say(session, job_id, command))
    _add(session, job_id, issued, command.generation, now_ns)


def _as_ranks_say(
    session: Session, job_id: str, command: TakeStacks | TakeDumps
) -> TakeStacks | TakeDumps:
    """Those of one node agree on the number of their generation."""
    generations = queries.reported_generations(session, session.get_one(JobRow, job_id))
    generation = generations.get(command.ranks[0], command.generation)
    return msgspec.structs.replace(command, generation=generation)


def ask_for_burst(
    session: Session, node: NodeRow, collectors: list[str], seconds: float, now_ns: int
) -> None:
    """Have a node's agent collect ten times a second. The node must hold ranks of a job."""
    assert node.job_id is not None
    job = session.get_one(JobRow, node.job_id)
    (command_id,) = reserve_command_ids(session, 1)
    command = Burst(command_id=command_id, collectors=collectors, seconds=seconds)
    asked = IssuedCommand(agent_id=node.agent_id, action_id="", command=command)
    _add(session, job.id, asked, job.generation, now_ns)


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
    """A result for another agent's command, or a second one, changes nothing."""
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
    """Take back what only makes sense for generations that are over.

    Orders to stop stay: an agent that comes back late must still kill what it left running.
    `before_generation` None: the job is over.
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
    """Forget those that were finished by then, but for those of actions that run."""
    runs = select(ActionRow.id).where(ActionRow.state == "running")
    old = select(CommandRow.id).where(
        CommandRow.finished_ns < before_ns, CommandRow.action_id.not_in(runs)
    )
    session.execute(delete(AcknowledgementRow).where(AcknowledgementRow.command_id.in_(old)))
    session.execute(delete(CommandRow).where(CommandRow.id.in_(old)))


def unfinished_commands(session: Session) -> dict[str, list[tuple[int, str]]]:
    """(id, body) by agent, in the order of issue."""
    query = (
        select(CommandRow.agent_id, CommandRow.id, CommandRow.body)
        .where(CommandRow.finished_ns.is_(None))
        .order_by(CommandRow.id)
    )
    found: dict[str, list[tuple[int, str]]] = {}
    for row in session.execute(query):
        found.setdefault(row.agent_id, []).append((row.id, row.body))
    return found
