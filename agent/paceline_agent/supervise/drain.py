"""Have ranks save a checkpoint before the agent stops them, so that draining a node loses no steps.

The agent writes the command to the ranks' control pages, as it does for the server. The ranks of
other nodes take part, because all ranks of a job agree on the step. They continue after it; the
server decides what happens to them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from paceline_agent.rings.reader import Rings
from paceline_agent.supervise.supervisor import Supervisor
from paceline_wire.ring import Ability, ControlKind

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
# Newer than any command of the server, exact in float64, and the same on all nodes, so that nodes
# that are drained together ask for one checkpoint.
COMMAND_ID = 1 << 52

Generation = tuple[str, int]  # job, generation


async def save_checkpoints(
    supervisor: Supervisor, rings: Rings, seconds: float, hurry: asyncio.Event
) -> None:
    """Ask the ranks for a checkpoint, and wait at most `seconds` for it, or until `hurry`.

    Only jobs all of whose ranks on this node have declared that they save on command are asked and
    waited for.
    """
    asked = [each for each in supervisor.generations() if _can_save(supervisor, rings, *each)]
    if not asked or seconds <= 0:
        return
    for job, generation in asked:
        rings.control(job, generation, COMMAND_ID, ControlKind.CHECKPOINT, 0)
    deadline = time.monotonic() + seconds
    while waiting := _unanswered(supervisor, rings, asked):
        if hurry.is_set() or time.monotonic() > deadline:
            names = ", ".join(job for job, _ in waiting)
            log.warning("stopping the ranks of %s without the checkpoint that was requested", names)
            return
        await asyncio.sleep(POLL_SECONDS)
    log.info("the ranks have answered the request for a checkpoint")


def _can_save(supervisor: Supervisor, rings: Rings, job: str, generation: int) -> bool:
    able = {
        rank
        for rank, abilities in rings.abilities(job, generation).items()
        if abilities & Ability.CHECKPOINT
    }
    return supervisor.live_ranks(job, generation) <= able


def _unanswered(
    supervisor: Supervisor, rings: Rings, asked: Iterable[Generation]
) -> list[Generation]:
    """Return the generations with live ranks that have not answered finally."""
    return [
        (job, generation)
        for job, generation in asked
        if supervisor.live_ranks(job, generation) - rings.answered(job, generation, COMMAND_ID)
    ]
