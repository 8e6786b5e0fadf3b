"""The schedule of the repair arm: which fault hits which training, drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from paceline_evaluation.repair.cluster import Database
from paceline_evaluation.repair.faults import PLANS
from paceline_evaluation.repair.trainings import Training
from paceline_evaluation.repair.trial import FaultPlan


@dataclass(frozen=True)
class PlannedTrial:
    """One fault of one training; `seed` decides on rank, node and moment."""

    number: int
    plan: FaultPlan
    training: Training
    database: Database
    seed: str


def draw(
    kinds: Sequence[str],
    trials: int,
    seed: int,
    trainings: Sequence[Training],
    plans: Sequence[FaultPlan] = PLANS,
    usual: Database = "postgresql",
) -> list[PlannedTrial]:
    """Return `trials` faults of each kind. Faults and trainings occur in turn, in random order.

    Trials that can share a cluster and a job follow each other, in random order; those that end the
    job are the last of it.
    """
    drawn = []
    for kind in kinds:
        chance = random.Random(f"{seed} {kind}")
        own = [plan for plan in plans if plan.kind == kind]
        chance.shuffle(own)
        queue = Turns(trainings, chance)
        for number, plan in enumerate(islice(cycle(own), trials if own else 0)):
            training = queue.next(plan)
            if training is not None:
                database = plan.database or usual
                drawn.append(
                    PlannedTrial(number, plan, training, database, f"{seed} {kind} {number}")
                )
    order = random.Random(f"{seed}")
    order.shuffle(drawn)
    names = [training.name for training in trainings]
    drawn.sort(
        key=lambda trial: (
            trial.database != usual,
            names.index(trial.training.name),
            trial.plan.outcome == "end",
        )
    )
    return drawn


class Turns:
    """Trainings in turn, each time in another order."""

    def __init__(self, trainings: Sequence[Training], chance: random.Random) -> None:
        self._chance, self._all = chance, trainings
        self._queue: list[Training] = []

    def next(self, plan: FaultPlan) -> Training | None:
        """Return the next training that can have the fault; None: none can."""
        fitting = [one for one in self._all if one.has_manifests or not plan.needs_manifests]
        if not fitting:
            return None
        if not any(one in fitting for one in self._queue):
            self._queue += self._chance.sample(list(self._all), len(self._all))
        found = next(one for one in self._queue if one in fitting)
        self._queue.remove(found)
        return found


def groups(trials: Sequence[PlannedTrial], most: int) -> Iterator[list[PlannedTrial]]:
    """Yield the trials of one job each: at most `most`, and none after one that ends the job."""
    group: list[PlannedTrial] = []
    for trial in trials:
        is_full = len(group) >= most or (group and group[-1].plan.outcome == "end")
        if group and (is_full or trial.training != group[-1].training):
            yield group
            group = []
        group.append(trial)
    if group:
        yield group
