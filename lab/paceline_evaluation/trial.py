"""Play one trial: a synthetic job with its faults, from the first step to its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_evaluation.endings import crash, hang
from paceline_evaluation.faults import CHRONIC
from paceline_evaluation.plans import draw_plan
from paceline_evaluation.record import TrialRecord
from paceline_evaluation.synthetic_job import SyntheticJob

_LARGE = 256  # ranks
_STEPS_OF_LARGE = 100
_FAULTY_STEPS_OF_LARGE = 20
_SPANS_PER_STRETCH = 60_000  # limits the memory of steps that are computed together


@dataclass(frozen=True, slots=True)
class Length:
    """The least and largest number of steps in each part of a trial."""

    healthy: tuple[int, int] = (40, 160)  # before the onset
    faulty: tuple[int, int] = (16, 40)
    none: tuple[int, int] = (300, 500)  # in a trial without faults
    chronic: tuple[int, int] = (60, 90)  # in a trial whose fault is present from the start


def run_trial(kind: str, seed: tuple[int, int, int], largest: int, length: Length) -> TrialRecord:
    """Run one trial. The same arguments give the same record."""
    chance = np.random.default_rng(seed)
    onset = int(chance.integers(*length.healthy))
    plan = draw_plan(kind, chance, onset, largest)
    grows = max((fault.counted_step - fault.onset_step for fault in plan.faults), default=0)
    steps = draw_steps(kind, chance, onset + grows, length, plan.shape.world_size)
    record = Trial(kind, plan, steps, chance).run()
    record.number = seed[-1]
    return record


def draw_steps(
    kind: str, chance: np.random.Generator, onset: int, length: Length, world_size: int
) -> int:
    """Return the number of steps; fewer for large jobs, but always past the onset."""
    is_large = world_size > _LARGE
    if kind == "none" or kind in CHRONIC:
        steps = int(chance.integers(*(length.none if kind == "none" else length.chronic)))
        return min(steps, _STEPS_OF_LARGE) if is_large else steps
    faulty = int(chance.integers(*length.faulty))
    return onset + (min(faulty, _FAULTY_STEPS_OF_LARGE) if is_large else faulty)


class Trial(SyntheticJob):
    """A synthetic job with the sequence of its trial."""

    def run(self) -> TrialRecord:
        """Play all steps, then the hang or crash, if any. Return what the engine reported."""
        ending = next(
            (fault for fault in self.plan.faults if fault.kind in ("hang", "crash")), None
        )
        last = self.record.steps if ending is None else ending.onset_step
        rows = sum(map(len, self.program.rows)) // len(self.program.rows)
        stretch = int(np.clip(_SPANS_PER_STRETCH // (rows * self.shape.world_size), 1, 32))
        for first in range(0, last, stretch):
            self.play_steps(first, min(stretch, last - first))
        if ending is not None:
            self.onsets[ending.onset_step] = self.seconds
            (hang if ending.kind == "hang" else crash)(self, ending)
        self.record.onset_seconds = tuple(
            self.onsets.get(fault.counted_step, 0.0) for fault in self.plan.faults
        )
        return self.record
