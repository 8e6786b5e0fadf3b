"""Shared by the benchmarks: the result, and timing of short pieces of code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from time import thread_time_ns
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One row of `bench.json`. `baseline` and `goal` are in the unit of `value`.

    A value that is not `resolved`, because its error is too large, neither meets nor misses its
    goal: `met` is then null.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    goal: float | None = None
    more_is_better: bool = False
    resolved: bool = True

    def row(self) -> dict[str, Any]:
        fields = asdict(self)
        more = fields.pop("more_is_better")
        resolved = fields.pop("resolved")
        ratio = round(self.value / self.baseline, 4) if self.baseline else None
        met = None
        if self.goal is not None and resolved:
            met = self.value >= self.goal if more else self.value <= self.goal
        return {**fields, "value": round(self.value, 4), "ratio": ratio, "met": met}


def nanoseconds_each(
    candidates: Mapping[str, Callable[[int], None]], count: int = 20_000, repeats: int = 25
) -> dict[str, float]:
    """Return the median CPU time of one round of each candidate, called with the number of rounds.

    The time is of this thread only: waiting for a processor does not count. The candidates take
    turns within each repeat, so that a slow period of the machine affects all.
    """
    costs: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate(count)  # warm up caches and the interpreter's specialization
    for _ in range(repeats):
        for name, candidate in candidates.items():
            started = thread_time_ns()
            candidate(count)
            costs[name].append((thread_time_ns() - started) / count)
    return {name: median(values) for name, values in costs.items()}
