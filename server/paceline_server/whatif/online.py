"""What-if replay of the recent steps of a running job: the gain of fixing a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from paceline_server.steps.grid import grid_of
from paceline_server.steps.timing import StepTiming
from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import Analysis, PreparedTrace, ideal_seconds, judge_step
from paceline_server.whatif.columns import Layout
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.fixes import Fixes
from paceline_server.whatif.model import Model, lay_out
from paceline_server.whatif.order import COMPUTE_OPTYPES
from paceline_server.whatif.replay import Seconds, replay, step_seconds
from paceline_server.whatif.schedules import Actions, ScheduledAction
from paceline_server.whatif.verdict import Repairs, ReplayVerdict, judge
from paceline_server.whatif.window import Window, align
from paceline_wire.topology import Topology

# A replay that differs from the recording by more than this factor is not used.
MISFIT = 1.5

# Number of parts of each kind that are replayed.
PARTS_TRIED = 3
# A fix with a smaller speedup is not reported.
LEAST_SPEEDUP = 1.01
# A smaller part is preferred if its fix gains at least this share of a larger part's gain.
SIMILAR_GAIN_RATIO = 0.9

KINDS = ("rank", "worker", "stage", "dp_rank", "optype")  # smallest part first

Part = TypeVar("Part", int, str)


@dataclass(frozen=True, slots=True)
class Fix:
    """The gain if one part of the job were as fast as its peers."""

    kind: str  # one of KINDS; a worker includes all its tensor-parallel ranks
    target: str  # "rank 5", "ranks 4-5", "stage 1", "dp rank 0" or "forward-compute"
    speedup: float  # current step time over step time with the fix


class RunReplay:
    """Replays of the recent steps of a job with some parts as fast as their peers.

    Results are computed on first use. Step times are those of the replay, in seconds.
    """

    def __init__(
        self, timings: Sequence[StepTiming], topology: Topology, metadata: Mapping[str, str]
    ) -> None:
        self.timings = timings
        self.topology = topology
        self.metadata = metadata

    def slowdown(self) -> float | None:
        """Return S, recorded over ideal step time; None if the steps cannot be replayed."""
        analysis = self.analysis
        return None if analysis is None else analysis.slowdown

    def speedup(
        self,
        *,
        ranks: Collection[int] = (),
        stages: Collection[int] = (),
        links: Collection[tuple[int, int]] = (),
        optypes: Collection[str] = (),
        excess_seconds: Mapping[int, float] | None = None,
        data_wait_limits: Mapping[int, float] | None = None,
        since_step: int | None = None,
    ) -> float | None:
        """Return the current step time over the step time with these parts idealized (1.21: 21%
        faster).

        Args:
            ranks: ranks that become as fast as their peers.
            stages: pipeline stages that take the mean of all stages.
            links: pairs of ranks; their communication takes the median of its type.
            optypes: operation types, named as in `Analysis.slowdown_by_optype`.
            excess_seconds: seconds per step to remove from a rank (data wait, GC, checkpoint).
            data_wait_limits: most seconds that a rank waits for the data of a step.
            since_step: leave out earlier steps, unless no step is left then.
        Returns:
            The speedup; None if the steps cannot be replayed or a part has no peers.
        """
        built = self.built
        if built is None:
            return None
        fixes = Fixes(built.window, built.seconds, self._layers)
        fixes.idealize_ranks(ranks)
        fixes.idealize_stages(stages)
        fixes.idealize_links(links)
        fixes.idealize_optypes(optypes)
        fixes.remove_excess(excess_seconds or {})
        fixes.limit_data_waits(data_wait_limits or {})
        if fixes.without_peers:
            return None
        counted = np.array(built.window.steps) >= (-1 if since_step is None else since_step)
        if not counted.any():
            counted[:] = True
        fixed = float(built.step_seconds(fixes.seconds)[counted].mean())
        return float(self._recorded_step_seconds[counted].mean()) / fixed if fixed > 0 else None

    def actions(self) -> Actions | None:
        """Return the executed schedule; microbatches without a number are numbered in order."""
        if self.built is None:
            return None
        order = self.built.window.order
        ops_of = {optype: op for op, optype in COMPUTE_OPTYPES.items()}
        return [
            [
                ScheduledAction(
                    ops_of[order.optype[op]], order.microbatch[op], max(order.chunk[op], 0)
                )
                for op in chain
            ]
            for chain in order.compute
        ]

    def verdict(self) -> ReplayVerdict | None:
        """Return the cause of the slowdown; None if the steps cannot be replayed."""
        analysis = self.analysis
        if analysis is None:
            return None
        tried = analysis.slowest_workers[:PARTS_TRIED]
        named = {lowest: self._fix_worker(lowest) for lowest in tried}
        ranks = [
            rank
            for lowest in analysis.slowest_workers
            for rank in (named[lowest][1] if lowest in named else self._worker(lowest))
        ]
        repairs = Repairs(
            {lowest: fix.target for lowest, (fix, _) in named.items()},
            self.speedup(ranks=ranks),
            self.speedup(stages=[self.topology.pp - 1]),
        )
        return judge(analysis, repairs)

    def fixes(self) -> list[Fix]:
        """Return the fixes with a notable gain, the best first.

        Of each kind the parts that lengthen the step most are replayed. Parts overlap: a slow rank
        is also part of a slow stage. Among parts with a similar gain the smallest comes first.
        """
        analysis = self.analysis
        if analysis is None:
            return []
        ranks = grid_of(self.topology).ranks
        tried = [self._fix_worker(lowest)[0] for lowest in _slowest(analysis.slowdown_by_worker)]
        if self.topology.pp > 1:
            tried += [
                Fix("stage", f"stage {stage}", self._gain(stages=[stage]))
                for stage in _slowest(analysis.slowdown_by_stage)
            ]
        if ranks.shape[1] > 1:
            tried += [
                Fix(
                    "dp_rank",
                    f"dp rank {dp_rank}",
                    self._gain(ranks=ranks[:, dp_rank].ravel().tolist()),
                )
                for dp_rank in _slowest(analysis.slowdown_by_dp_rank)
            ]
        tried += [
            Fix("optype", optype, self._gain(optypes=[optype]))
            for optype in _slowest(analysis.slowdown_by_optype)
        ]
        return _in_order([fix for fix in tried if fix.speedup >= LEAST_SPEEDUP])

    def _worker(self, lowest: int) -> list[int]:
        grid = grid_of(self.topology)
        ranks: list[int] = grid.ranks[grid.stage[lowest], grid.replica[lowest]].tolist()
        return ranks

    def _fix_worker(self, lowest: int) -> tuple[Fix, list[int]]:
        """Return the fix of a worker, or of its only slow rank, and the fixed ranks."""
        assert self.built is not None
        stage, dp_rank, _ = self.built.window.layout.place(lowest)
        ranks = self._worker(lowest)
        gain = self._gain(ranks=ranks)
        own = self.built.window.own[self.built.window.order.compute[stage]]
        slowest = ranks[int(own[:, :, dp_rank].sum(axis=(0, 1)).argmax())]
        gain_of_slowest = gain if len(ranks) == 1 else self._gain(ranks=[slowest])
        if gain_of_slowest - 1.0 >= SIMILAR_GAIN_RATIO * (gain - 1.0):
            return Fix("rank", f"rank {slowest}", gain_of_slowest), [slowest]
        return Fix("worker", _ranks_text(ranks), gain), ranks

    def _gain(self, **parts: Any) -> float:
        """Return the speedup with the parts idealized; 1.0 if it is unknown."""
        return self.speedup(**parts) or 1.0

    @cached_property
    def analysis(self) -> Analysis | None:
        """All slowdowns of the recent steps; None if they cannot be replayed."""
        built = self.built
        if built is None:
            return None
        window, model = built.window, built.model
        optype = np.array(window.order.optype)[model.order]
        recorded = built.seconds[model.order]
        stage = np.array(window.order.stage)[model.order]
        chunk = np.array(window.order.chunk)[model.order]
        microbatch = np.array(window.order.microbatch)[model.order]
        ideal = ideal_seconds(optype, recorded)
        step = PreparedTrace(model, optype, stage, chunk, microbatch, recorded, ideal)
        ranks = grid_of(self.topology).ranks[:, :, 0].T
        return judge_step(
            step,
            np.array(window.steps),
            np.arange(ranks.shape[0]),
            ranks,
            float(window.recorded_seconds.mean()),
        )

    @cached_property
    def built(self) -> Built | None:
        """The prepared steps; None if they cannot be replayed."""
        window = align(self.timings, Layout(self.topology))
        if window is None:
            return None
        synchronized = ops.SYNCHRONIZED.union(ops.COMPUTE if window.coupled else ())
        try:
            model = lay_out(window.order.dependencies(), window.order.optype, synchronized)
        except TraceError:  # dependency cycle: a rank's clock went backwards
            return None
        built = Built(window, model, window.times())
        recorded = float(window.recorded_seconds.mean())
        replayed = float(built.step_seconds(built.seconds).mean())
        fits = recorded / MISFIT < replayed < recorded * MISFIT
        return built if fits else None

    @cached_property
    def _recorded_step_seconds(self) -> Seconds:
        """Step times of the replay of recorded durations. [step]"""
        built = self.built
        return np.zeros(0) if built is None else built.step_seconds(built.seconds)

    @cached_property
    def _layers(self) -> dict[int, int]:
        """Number of layers by part of the model; empty if the job does not report them."""
        words = self.metadata.get("stage_layers", "").split(",")
        return {part: int(word) for part, word in enumerate(words) if word.strip().isdigit()}


@dataclass(frozen=True, slots=True)
class Built:
    """The recent steps, prepared for replay."""

    window: Window
    model: Model
    seconds: Seconds  # [operation, step, dp rank], as recorded

    def ends(self) -> Seconds:
        """Return end times in seconds since the start of the step. [operation, step, dp rank]"""
        ends = np.empty_like(self.seconds)
        ends[self.model.order] = replay(self.model, self.seconds[self.model.order])
        return ends

    def step_seconds(self, seconds: Seconds) -> Seconds:
        """Return step times for these durations of operations. [step]"""
        return step_seconds(self.model, replay(self.model, seconds[self.model.order]))


def _ranks_text(ranks: list[int]) -> str:
    """Return `ranks 4-5`; `ranks 0, 4` if others are between them, as in some layouts."""
    low, high = min(ranks), max(ranks)
    is_row = high - low == len(ranks) - 1
    return f"ranks {low}-{high}" if is_row else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _slowest(slowdowns: Mapping[Part, float]) -> list[Part]:
    """Return the parts that lengthen the step most, the worst first."""
    worst = sorted(slowdowns, key=lambda part: -slowdowns[part])
    return [part for part in worst[:PARTS_TRIED] if slowdowns[part] >= LEAST_SPEEDUP]


def _in_order(fixes: list[Fix]) -> list[Fix]:
    """Return the fixes by descending gain; among similar gains the smallest part first."""
    left = sorted(fixes, key=lambda fix: -fix.speedup)
    result: list[Fix] = []
    while left:
        enough = SIMILAR_GAIN_RATIO * (left[0].speedup - 1.0)
        similar = [fix for fix in left if fix.speedup - 1.0 >= enough]
        result.append(min(similar, key=lambda fix: KINDS.index(fix.kind)))
        left.remove(result[-1])
    return result
