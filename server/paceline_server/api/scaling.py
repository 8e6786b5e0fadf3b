"""Scaling efficiency of a job against earlier runs of the same name on fewer ranks."""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.api import schemas
from paceline_server.steps.types import Efficiency
from paceline_server.store import models, queries

_RUNS = 50  # newest earlier runs that are compared
_RATES = ("tokens_per_second", "samples_per_second")


def scaling(session: Session, job: models.JobRow) -> schemas.ScalingModel | None:
    """Return the throughput per rank over that of the smallest earlier run.

    The newest of several runs of that size counts. Returns None without such a run, or if it
    counted nothing.
    """
    rates = [name for name in _RATES if _rate(job.ledger.efficiency, name) is not None]
    if not rates:
        return None
    ranks = job.topology.world_size
    base = min(
        (
            earlier
            for earlier in queries.earlier_runs(session, job, _RUNS)
            if earlier.topology.world_size < ranks
            and any(_rate(earlier.ledger.efficiency, name) is not None for name in rates)
        ),
        key=lambda earlier: (earlier.topology.world_size, -earlier.created_ns),
        default=None,
    )
    if base is None:
        return None
    for name in rates:
        own, other = _rate(job.ledger.efficiency, name), _rate(base.ledger.efficiency, name)
        if own is not None and other is not None:
            base_ranks = base.topology.world_size
            return schemas.ScalingModel(
                efficiency_ratio=(own / ranks) / (other / base_ranks),
                ranks=ranks,
                base_ranks=base_ranks,
                base_job_id=base.id,
                compared=name,  # type: ignore[arg-type]  # pydantic checks it
            )
    return None


def _rate(efficiency: Efficiency, name: str) -> float | None:
    rate: float | None = getattr(efficiency, name)
    return rate or None
