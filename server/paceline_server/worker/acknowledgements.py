"""The ranks' results of control commands, and the checkpoint that they complete."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.types import Acknowledged
from paceline_server.store.models import CommandRow
from paceline_wire.batch import Event, RankAcknowledged
from paceline_wire.commands import Command, ControlRanks, decode_line

_STATUSES = ("seen", "done", "failed")  # that ranks send
# "done": a checkpoint was saved. A rank answers that, too, to a command that withdraws another one.
_WITHDRAWN = "withdrawn"


def genuine_acknowledgements(
    session: Session, job_id: str, generation: int, events: Iterable[Event]
) -> tuple[Acknowledged, ...]:
    """Return the acknowledgements in `events` that are for commands to this generation.

    Each agent gets its own command id, and the ranks agree on the newest one, so a rank may
    acknowledge the id that was sent to another agent.
    """
    acknowledgements = [
        event
        for event in events
        if isinstance(event, RankAcknowledged)
        and event.job == job_id
        and event.generation == generation
        and event.status in _STATUSES
    ]
    if not acknowledgements:
        return ()
    ids = {event.command_id for event in acknowledgements}
    query = select(CommandRow.id, CommandRow.body).where(
        CommandRow.id.in_(ids), CommandRow.job_id == job_id, CommandRow.generation == generation
    )
    issued = {command_id: decode_line(body) for command_id, body in session.execute(query)}
    return tuple(
        Acknowledged(
            event.rank, event.command_id, _status(event, issued[event.command_id]), event.step
        )
        for event in acknowledgements
        if event.command_id in issued
    )


def _status(event: RankAcknowledged, command: Command) -> str:
    is_cancel = isinstance(command, ControlRanks) and command.kind == "cancel"
    return _WITHDRAWN if is_cancel and event.status == "done" else event.status


def merge(stored: Iterable[Acknowledged], new: Iterable[Acknowledged]) -> list[Acknowledged]:
    """Return the newest acknowledgement of each rank and command; a final one is never replaced."""
    merged = {(result.command_id, result.rank): result for result in stored}
    for result in new:
        before = merged.get((result.command_id, result.rank))
        if before is None or before.status == "seen":
            merged[result.command_id, result.rank] = result
    return list(merged.values())


def checkpoint_step(acknowledged: Iterable[Acknowledged], world_size: int) -> int | None:
    """Return the newest step that every rank reported as saved."""
    saved: dict[int, set[int]] = {}
    for result in acknowledged:
        if result.status == "done":
            saved.setdefault(result.step, set()).add(result.rank)
    complete = [step for step, ranks in saved.items() if len(ranks) == world_size]
    return max(complete, default=None)
