"""Scaling efficiency of a job against earlier runs of the same name on fewer ranks."""

from __future__ import annotations

from sqlalchemy.orm import Session

from paceline_server.api import schemas
from paceline_server.steps.types import Efficiency
from paceline_server.store import models, queries

_RUNS = 50  # newest earlier runs that are compared
_RATES = ("tokens_per_second", "samples_per_second")
# Model FLOPs per token or sample of two runs that differ by more are those of two models.
_SAME_MODEL = 0.1


def scaling(session: Session, job: models.JobRow) -> schemas.ScalingModel | None:
    """Return the throughput per rank over that of the smallest earlier run.

    The newest of several runs of that size counts. Returns None without such a run, if it counted
    nothing, or if all of them are known to train other models.
    """
    ranks, measured = job.topology.world_size, job.ledger.efficiency
    if not any(_rate(measured, name) for name in _RATES):
        return None
    compared = (
        (earlier, name)
        for earlier in queries.earlier_runs(session, job, _RUNS)
        if earlier.topology.world_size < ranks
        and (name := _compared(measured, earlier.ledger.efficiency)) is not None
    )
    base, name = min(
        compared,
        key=lambda found: (found[0].topology.world_size, -found[0].created_ns),
        default=(None, ""),
    )
    if base is None:
        return None
    base_ranks = base.topology.world_size
    own, other = _rate(measured, name), _rate(base.ledger.efficiency, name)
    return schemas.ScalingModel(
        efficiency_ratio=(own / ranks) / (other / base_ranks),
        ranks=ranks,
        base_ranks=base_ranks,
        base_job_id=base.id,
        compared=name,  # type: ignore[arg-type]  # pydantic checks it
    )


def _compared(one: Efficiency, other: Efficiency) -> str | None:
    """Return the rate that both runs counted; None without one, or if their models differ."""
    name = next((name for name in _RATES if _rate(one, name) and _rate(other, name)), None)
    if name is None:
        return None
    flops, other_flops = one.model_flops_per_second, other.model_flops_per_second
    if not flops or not other_flops:
        return name  # not known
    ratio = (flops / _rate(one, name)) / (other_flops / _rate(other, name))
    return name if abs(ratio - 1.0) <= _SAME_MODEL else None


def _rate(efficiency: Efficiency, name: str) -> float:
    """Return a rate; 0: not counted."""
    rate: float | None = getattr(efficiency, name)
    return rate or 0.0
