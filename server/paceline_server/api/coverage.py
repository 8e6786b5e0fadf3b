"""The communication of a job that is not recorded, as its ranks and its steps show it."""

from __future__ import annotations

from paceline_server.store.models import JobRow
from paceline_wire.coverage import NOT_RECORDED

_LONGEST_REASON = 200
_FEWEST_STEPS = 10  # after which a job that communicates has been blocked in it at least once


def unrecorded_communication(job: JobRow) -> str | None:
    """Return in one sentence why waits for other ranks count as compute; None if they do not."""
    if job.topology.world_size == 1:
        return None
    reported = job.spec.metadata.get(NOT_RECORDED)
    if reported is not None:
        reason = "".join(filter(str.isprintable, reported))[:_LONGEST_REASON]
        return f"Communication is not recorded: {reason}, so waits count as compute."
    spent = job.ledger
    if (job.step or 0) < _FEWEST_STEPS or not spent.compute_seconds:
        return None
    blocked = spent.communication_seconds + spent.peer_wait_seconds
    blocked += spent.straggler_seconds + spent.imbalance_seconds + spent.slow_link_seconds
    if blocked or spent.bubble_seconds or spent.bubble_excess_seconds:
        return None
    return (
        "No communication between the ranks was recorded, so waits, if there are any, count as "
        "compute."
    )
