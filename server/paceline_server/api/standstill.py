"""The sentence about a running job whose ranks have all been in the same operations for long.

Most standstills are no hang: a checkpoint, an evaluation of one rank, a download. Until the hang
detector has waited for longer than these last, the page shows which rank does what.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.detect.rank_list import ranks_text
from paceline_server.store import models, queries

_LEAST_SECONDS = 10.0
_LEAST_STEPS = 10.0  # in usual steps
_OPERATIONS = 3  # listed, those of most ranks first


def standstill(session: Session, job: models.JobRow) -> str | None:
    """Return which ranks are in which operation; None if any of them has begun another lately."""
    least = max(_LEAST_SECONDS, _LEAST_STEPS * (job.step_seconds or 0.0))
    seconds = queries.least_operation_seconds(session, job.id)
    if seconds is None or seconds < least:
        return None
    ranks = queries.ranks_by_operation(session, job.id)
    most = sorted(ranks, key=lambda operation: -len(ranks[operation]))
    listed = [f"{ranks_text(ranks[operation])} in {operation}" for operation in most[:_OPERATIONS]]
    more = ", and others" if len(most) > _OPERATIONS else ""
    return f"No progress for {seconds:.0f} s: {', '.join(listed)}{more}."
