"""Reports the cost of different sequence lengths in the microbatches.

Attention makes the time of a microbatch grow with the squares of its lengths, so equal numbers of
tokens are not equal work. The costs per token and per squared token are fitted to the recent steps.
These are then replayed with the fitted costs: as they were, with the same work spread evenly, and
with the same microbatches distributed over the replicas by cost. No component is at fault, so the
finding is advice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import SEQUENCE_VARIANCE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.detect.sequence_variance.settings import DEFAULTS, SequenceVarianceSettings
from paceline_server.detect.statistics.lengths import fit_cost
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.grid import RankGrid, grid_of
from paceline_server.steps.phase import PipelinePhase, PipelinePhaseReader
from paceline_server.steps.pipeline import Pipeline, PipelineAction
from paceline_server.steps.timing import StepTiming

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CAUSE = "sequence lengths"


@dataclass(frozen=True, slots=True)
class _Spread:
    """Seconds per step: recorded, and those of the pipeline phase as expected from the lengths."""

    step_seconds: float
    now_seconds: float
    even_seconds: float
    # with microbatches distributed by cost; None: there is only one replica
    dealt_seconds: float | None
    microbatch_spread: float  # expected time of the longest over the shortest microbatch
    explained: float  # share of the compute times' variance that lengths explain


class SequenceVarianceDetector(Detector):
    """Finding kind `sequence_variance`, fingerprint `sequence_variance`. Advice only."""

    kinds: ClassVar[tuple[Kind, ...]] = (SEQUENCE_VARIANCE,)
    order: ClassVar[int] = 15

    def __init__(
        self, generation: Generation, policy: Policy, settings: SequenceVarianceSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._reader = _LengthReplay(generation)
        self._steps = 0
        self._active: Finding | None = None

    def update(self, observation: Observation) -> list[Finding]:
        settings = self.settings
        before = self._steps - self.warmup_steps
        self._steps += len(observation.timings)
        now = self._steps - self.warmup_steps
        if now < settings.first_steps:
            return []
        first = before < settings.first_steps
        if not first and now // settings.steps == before // settings.steps:
            return []
        recent = [] if observation.replay is None else list(observation.replay.timings)
        recent = recent[-min(now, settings.steps) :]
        spread = self._reader.spread(recent)
        if spread is None:
            return []
        cost = (spread.now_seconds - spread.even_seconds) / max(spread.step_seconds, 1e-9)
        enough = spread.explained >= settings.explained
        if self._active is not None:
            if not enough or cost < settings.cost_ratio / 2:
                active, self._active = self._active, None
                return [
                    cleared(
                        active,
                        "Different sequence lengths no longer cost much.",
                        observation.now_ns,
                    )
                ]
            return []
        if not enough or cost < settings.cost_ratio:
            return []
        self._active = self._finding(spread, min(cost, 1.0), recent, observation.now_ns)
        return [self._active]

    def _finding(
        self, spread: _Spread, cost: float, recent: list[StepTiming], now_ns: int
    ) -> Finding:
        advice = (
            "Fill microbatches by the sum of their squared sequence lengths, not by tokens: equal "
            f"microbatches give {gain(cost):.2f}x."
        )
        if spread.dealt_seconds is not None:
            saved = (spread.now_seconds - spread.dealt_seconds) / max(spread.step_seconds, 1e-9)
            if saved >= 0.01:
                advice += (
                    " Sorting the current microbatches by that sum and dealing them to the "
                    f"data-parallel ranks in turn gives {gain(saved):.2f}x."
                )
        return self.finding(
            "sequence_variance",
            cause=CAUSE,
            summary=(
                f"Some microbatches take up to {spread.microbatch_spread:.1f}x as long as others, "
                f"because of their sequence lengths. It {cost_text(cost, gain(cost))}."
            ),
            now_ns=now_ns,
            onset_step=recent[0].step,
            step=recent[-1].step,
            cost_ratio=cost,
            speedup=gain(cost),
            persistence="chronic",
            advice=advice,
            evidence=[
                Evidence(
                    f"lengths explain {percent(spread.explained)} of the variance of compute times",
                    "explained_variance",
                    spread.explained,
                ),
                Evidence(
                    f"the pipeline phase takes {spread.now_seconds * 1e3:.0f} ms per step; "
                    f"{spread.even_seconds * 1e3:.0f} ms with equal microbatches",
                    "phase_seconds",
                    spread.now_seconds,
                    spread.even_seconds,
                ),
            ],
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """Steps of replicas, one per lane. Arrays are [action, lane], times in seconds."""

    pipeline: Pipeline
    seconds: Floats
    tokens: Ints
    squares: Ints


class _LengthReplay:
    """Replays steps with the compute times expected from their sequence lengths."""

    def __init__(self, generation: Generation) -> None:
        self._topology = generation.topology
        self._reader = PipelinePhaseReader(generation.topology)

    def spread(self, timings: list[StepTiming]) -> _Spread | None:
        """Return None if lengths are not given or too little was recorded."""
        timings = [timing for timing in timings if (timing.compute.tokens > 0).any()]
        works = [work for timing in timings if (work := self._work(timing)) is not None]
        works = [work for work in works if work.seconds.shape == works[0].seconds.shape]
        if not works:
            return None
        pipeline, replicas = works[0].pipeline, works[0].seconds.shape[1]
        tokens = np.concatenate([work.tokens for work in works], axis=1)
        squares = np.concatenate([work.squares for work in works], axis=1)
        seconds = np.concatenate([work.seconds for work in works], axis=1)
        fitted = None if (tokens <= 0).any() else _expected(pipeline, tokens, squares, seconds)
        if fitted is None:
            return None
        expected, rates = fitted
        even = _even(pipeline, expected)
        dealt = None
        if replicas > 1:
            dealt = _dealt(pipeline, rates, tokens, squares, expected, replicas)

        def phase(lanes: Floats) -> float:
            """Return the mean seconds of a step's slowest replica, for which all others wait."""
            longest = pipeline.phase_seconds(lanes).reshape(-1, replicas).max(axis=1)
            return float(longest.mean())

        relative = expected / even
        step_seconds = [median(timing.ranks.step_seconds) for timing in timings]
        return _Spread(
            step_seconds=float(np.mean(step_seconds)),
            now_seconds=phase(expected),
            even_seconds=phase(even),
            dealt_seconds=None if dealt is None else phase(dealt),
            microbatch_spread=float(relative.max() / max(relative.min(), 1e-9)),
            explained=_explained(seconds / even, relative),
        )

    def _work(self, timing: StepTiming) -> _Work | None:
        """Return the work of one step; a job without a pipeline counts as a single stage."""
        if self._topology.pp > 1:
            phase = self._reader.read(timing)
            return None if phase is None else _of_phase(phase, timing, self._topology.world_size)
        return _of_single_stage(timing, grid_of(self._topology))


def _of_phase(phase: PipelinePhase, timing: StepTiming, world: int) -> _Work:
    """Return the rows of the ranks that represent their replica, in the order of the pipeline's
    actions."""
    pipeline, compute = phase.pipeline, timing.compute
    lane = np.full(world, -1)
    lane[phase.ranks] = np.arange(phase.ranks.shape[1])
    rows = np.flatnonzero((lane[compute.rank] >= 0) & (compute.microbatch >= 0))
    order = rows[np.lexsort((compute.start_ns[rows], compute.rank[rows]))]
    of_rank = {
        int(rank): own
        for rank, own in zip(
            np.unique(compute.rank[order]).tolist(),
            np.split(order, np.flatnonzero(np.diff(compute.rank[order])) + 1),
            strict=True,
        )
    }
    table = np.concatenate(
        [np.stack([of_rank[int(rank)] for rank in stage], axis=1) for stage in phase.ranks]
    )
    return _Work(pipeline, phase.seconds, compute.tokens[table], compute.squared_tokens[table])


def _of_single_stage(timing: StepTiming, grid: RankGrid) -> _Work | None:
    compute = timing.compute
    rows = np.flatnonzero((grid.shard[compute.rank] == 0) & (compute.microbatch >= 0))
    rows = rows[np.lexsort((compute.start_ns[rows], compute.rank[rows]))]
    if not rows.size:
        return None
    counts = np.unique(compute.rank[rows], return_counts=True)[1]
    if np.unique(counts).size > 1:
        return None
    table = rows.reshape(-1, int(counts[0])).T
    first = table[:, 0]
    actions = [
        PipelineAction(*action)
        for action in zip(
            compute.op[first].tolist(), compute.microbatch[first].tolist(), strict=True
        )
    ]
    if (compute.op[table] != compute.op[first][:, None]).any() or len(set(actions)) < len(actions):
        return None
    seconds = (compute.end_ns[table] - compute.start_ns[table]) / 1e9
    return _Work(Pipeline([actions]), seconds, compute.tokens[table], compute.squared_tokens[table])


def _cells(pipeline: Pipeline) -> list[Ints]:
    """Return the actions of each (stage, chunk, op)."""
    cell = (pipeline.chunk * pipeline.stages + pipeline.stage) * 4 + pipeline.op
    order = np.argsort(cell, kind="stable")
    return list(np.split(order, np.flatnonzero(np.diff(cell[order])) + 1))


def _expected(
    pipeline: Pipeline, tokens: Ints, squares: Ints, seconds: Floats
) -> tuple[Floats, Floats] | None:
    """Return expected seconds [action, lane] and coefficients (base, per token, per square)
    [action, 3]; None if there are too few microbatches to fit them."""
    expected, rates = np.empty_like(seconds), np.empty((pipeline.nodes, 3))
    for rows in _cells(pipeline):
        cost = fit_cost(tokens[rows].ravel(), squares[rows].ravel(), seconds[rows].ravel())
        if cost is None:
            return None
        expected[rows] = cost.seconds(tokens[rows], squares[rows])
        rates[rows] = cost.base, cost.per_token, cost.per_squared_token
    return expected, rates


def _even(pipeline: Pipeline, expected: Floats) -> Floats:
    """Return seconds if all microbatches of a (stage, chunk, op) took the mean."""
    even = np.empty_like(expected)
    for rows in _cells(pipeline):
        even[rows] = expected[rows].mean()
    return even


def _dealt(
    pipeline: Pipeline,
    rates: Floats,
    tokens: Ints,
    squares: Ints,
    expected: Floats,
    replicas: int,
) -> Floats:
    """Return seconds if each step's microbatches are sorted by cost and distributed in snake
    order."""
    microbatches, index = np.unique(pipeline.microbatch, return_inverse=True)
    of_microbatch = np.array([int(np.argmax(index == one)) for one in range(microbatches.size)])
    cost = np.zeros((microbatches.size, expected.shape[1]))
    np.add.at(cost, index, expected)
    dealt = np.empty_like(expected)
    for first in range(0, expected.shape[1], replicas):
        lanes = slice(first, first + replicas)
        order = np.argsort(-cost[:, lanes].ravel(), kind="stable").reshape(-1, replicas)
        order[1::2] = order[1::2, ::-1]
        given = [values[of_microbatch][:, lanes].ravel()[order] for values in (tokens, squares)]
        new_tokens, new_squares = (values[index] for values in given)
        dealt[:, lanes] = rates[:, :1] + rates[:, 1:2] * new_tokens + rates[:, 2:] * new_squares
    return dealt


def _explained(recorded: Floats, expected: Floats) -> float:
    """Return the squared correlation of relative durations, with outliers clipped."""
    recorded, expected = np.clip(recorded.ravel(), 0.2, 5.0), expected.ravel()
    if recorded.std() == 0 or expected.std() == 0:
        return 0.0
    return float(np.corrcoef(recorded, expected)[0, 1] ** 2)
