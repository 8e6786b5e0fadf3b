"""The typical step of a job in a number of steps: its duration, its parts and its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline_server.medians import column_medians, median
from paceline_server.steps.timing import Floats, RankTimes, StepTiming
from paceline_server.steps.types import StepSummary

COMPUTE, OPTIMIZER, DATA, COLLECTION = "compute", "the optimizer", "data loading", "collection"
TRANSFERS, WAITS, OTHER = "communication", "waits for other ranks", "other host code"
PARTS = (COMPUTE, OPTIMIZER, DATA, COLLECTION, TRANSFERS, WAITS, OTHER)
# Parts that are the time of a rank itself, without what it waits for.
OWN_PARTS = frozenset({COMPUTE, OPTIMIZER, DATA, COLLECTION, OTHER})


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step, or medians or means of several, without checkpoints and evaluations."""

    seconds: float  # mean over the ranks
    parts: Floats  # those of `PARTS`, means over the ranks; they sum to `seconds`
    own: Floats  # by rank: its time without waits for other ranks; NaN: unknown
    work: Floats  # samples, tokens, and microbatches per rank; NaN: unknown


def parts_of(summary: StepSummary, timing: StepTiming, world: int) -> StepParts:
    """Return the parts of one step, which has rows of at least one rank."""
    ranks = timing.ranks
    seconds = _without_pauses(ranks)
    waits = ranks.wait_seconds + ranks.bubble_seconds
    transfers = np.maximum(ranks.communication_seconds - ranks.wait_seconds, 0.0)
    known = [
        ranks.compute_seconds,
        ranks.optimizer_seconds,
        ranks.data_wait_seconds,
        ranks.gc_seconds,
        transfers,
        waits,
    ]
    own = np.full(world, np.nan)
    own[ranks.rank] = ranks.self_seconds + ranks.host_seconds + ranks.data_wait_seconds
    rows = np.array([*known, seconds - np.sum(known, axis=0)])
    counted = (summary.samples, summary.tokens, timing.compute.rank.size / ranks.rank.size)
    work = np.array([np.nan if not count else float(count) for count in counted])
    return StepParts(float(seconds.mean()), rows.mean(axis=1), own, work)


def only_seconds(seconds: float, world: int) -> StepParts:
    """Return a step of which nothing but its duration is known."""
    parts, own, work = (np.full(count, np.nan) for count in (len(PARTS), world, 3))
    return StepParts(seconds, parts, own, work)


def typical(steps: Sequence[StepParts]) -> StepParts:
    """Return the medians of several steps."""
    return StepParts(
        median([step.seconds for step in steps]),
        np.median([step.parts for step in steps], axis=0),
        column_medians(np.array([step.own for step in steps])),
        column_medians(np.array([step.work for step in steps])),
    )


def mean(steps: Sequence[StepParts]) -> StepParts:
    """Return the means of several steps; NaN where a value is unknown in one of them."""
    return StepParts(
        fmean(step.seconds for step in steps),
        np.mean([step.parts for step in steps], axis=0),
        np.mean([step.own for step in steps], axis=0),
        np.mean([step.work for step in steps], axis=0),
    )


def _without_pauses(ranks: RankTimes) -> Floats:
    pauses = ranks.checkpoint_seconds + ranks.evaluation_seconds + ranks.evaluation_wait_seconds
    seconds: Floats = np.maximum(ranks.step_seconds - pauses, 1e-9)
    return seconds
