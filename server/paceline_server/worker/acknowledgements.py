"""Ranks' answers to control commands, and the checkpoint they add up to."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from paceline_server.decide.types import Acknowledged
from paceline_server.store.models import CommandRow
from paceline_wire.batch import RankAcknowledged

_FINAL = ("done", "failed")
_STATUSES = ("seen", *_FINAL)


def genuine(
    session: Session, job_id: str, generation: int, heard: Iterable[tuple[str, RankAcknowledged]]
) -> list[Acknowledged]:
    """Of (agent, event), those that answer a command of this generation.

    Each agent was given an id of its own, and the ranks agree on the newest of them: a rank may
    well answer with the id that another agent was given.
    """
    events = [
        event
        for _, event in heard
        if event.job == job_id and event.generation == generation and event.status in _STATUSES
    ]
    if not events:
        return []
    ids = {event.command_id for event in events}
    query = select(CommandRow.id).where(
        CommandRow.id.in_(ids), CommandRow.job_id == job_id, CommandRow.generation == generation
    )
    asked = set(session.scalars(query))
    return [
        Acknowledged(event.rank, event.command_id, event.status, event.step)
        for event in events
        if event.command_id in asked
    ]


def merge(known: list[Acknowledged], new: list[Acknowledged]) -> list[Acknowledged]:
    """The newest of each rank and command; a final answer stays."""
    merged = {(each.command_id, each.rank): each for each in known}
    for each in new:
        before = merged.get((each.command_id, each.rank))
        if before is None or before.status not in _FINAL:
            merged[each.command_id, each.rank] = each
    return list(merged.values())


def checkpoint_step(acknowledged: list[Acknowledged], world_size: int) -> int | None:
    """The newest step that every rank reported as saved."""
    done: dict[int, set[int]] = {}
    for each in acknowledged:
        if each.status == "done":
            done.setdefault(each.step, set()).add(each.rank)
    complete = [step for step, ranks in done.items() if len(ranks) == world_size]
    return max(complete, default=None)
