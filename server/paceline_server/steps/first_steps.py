"""The first steps of a generation, from which its usual step is measured."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from paceline_server.steps.types import StepSummary, UsualStep
from paceline_wire.topology import Topology

# Allocators, caches, JIT and page faults make the first steps of a generation slow by different
# amounts.
WARMUP_STEPS = 3
LEAST_STEPS = 32
# A median over less time may be that of a busy moment.
LEAST_SECONDS = 15.0
MOST_STEPS = 1024


class FirstSteps:
    """Collects steps until they are enough for medians, which are then `usual`."""

    def __init__(self, generation: int) -> None:
        self.usual: UsualStep | None = None
        self._generation = generation
        self._skipped = 0
        self._steps: list[tuple[float, int | None, int | None]] = []

    def add(self, steps: Iterable[StepSummary], topology: Topology) -> None:
        """Add finished steps. Those after the first ones change nothing."""
        for step in steps if self.usual is None else ():
            if self._skipped < WARMUP_STEPS:
                self._skipped += 1
            else:
                self._steps.append((step.mean_seconds, step.samples, step.tokens))
        seconds, samples, tokens = zip(*self._steps, strict=True) if self._steps else ((), (), ())
        count = len(seconds)
        if self.usual is not None or count < LEAST_STEPS:
            return
        if sum(seconds) >= LEAST_SECONDS or count >= MOST_STEPS:
            self.usual = UsualStep(
                generation=self._generation,
                topology=topology,
                seconds=median(seconds),
                samples=_median(samples),
                tokens=_median(tokens),
            )
            self._steps.clear()


def _median(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
