"""What-if replay of the recent steps of a running generation: the gain of fixing a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

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

# Number of parts of each kind that are tried; a repair with a smaller gain is not named.
PARTS_TRIED = 3
WORTH_NAMING = 1.01
# A smaller part is named if its repair gains at least this share of a larger part's gain.
AS_MUCH = 0.9

KINDS = ("rank", "worker", "stage", "dp_rank", "optype")  # the smallest first

Part = TypeVar("Part", int, str)


@dataclass(frozen=True, slots=True)
class Fix:
    """The gain if one part of the job were as fast as its peers."""

    kind: str  # of KINDS; a worker is all its tensor-parallel ranks
    target: str  # "rank 5", "ranks 4-5", "stage 1", "dp rank 0", "forward-compute"
    speedup: float  # step time now over step time then


class RunReplay:
    """The recent steps, replayed with parts of them as fast as their peers.

    Computed on first use; all times are those of the replay, in seconds.
    """

    def __init__(
        self, timings: Sequence[StepTiming], topology: Topology, metadata: Mapping[str, str]
    ) -> None:
        self.timings = timings
        self.topology = topology
        self.metadata = metadata

    def slowdown(self) -> float | None:
        """S: recorded over ideal step time; None: the steps cannot be replayed."""
        found = self.analysis
        return None if found is None else found.slowdown

    def speedup(
        self,
        *,
        ranks: Collection[int] = (),
        stages: Collection[int] = (),
        links: Collection[tuple[int, int]] = (),
        optypes: Collection[str] = (),
        excess_seconds: Mapping[int, float] | None = None,
        since_step: int | None = None,
    ) -> float | None:
        """Return step time now over step time with these parts idealized: 1.21 is a gain of 21%.

        `optypes`: as in `Analysis.slowdown_by_optype`.
        `excess_seconds`: per rank, time per step to take away outside of the model's operations
        (data wait, GC, checkpoint). `since_step`: leave out earlier steps; all steps
        count if none is left. None: the steps cannot be replayed, or the parts have
        no peers.
        """
        built = self.built
        if built is None:
            return None
        fixes = Fixes(built.window, built.seconds, self._layers)
        fixes.idealise_ranks(ranks)
        fixes.idealise_stages(stages)
        fixes.idealise_links(links)
        fixes.idealise_optypes(optypes)
        fixes.take_away(excess_seconds or {})
        if fixes.without_peers:
            return None
        counted = np.array(built.window.steps) >= (-1 if since_step is None else since_step)
        if not counted.any():
            counted[:] = True
        fixed = float(built.step_seconds(fixes.seconds)[counted].mean())
        return float(self._now[counted].mean()) / fixed if fixed > 0 else None

    def actions(self) -> Actions | None:
        """The executed schedule; microbatches without a number are counted."""
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
        """Return what slows the job, in one sentence; None: the steps cannot be replayed."""
        found = self.analysis
        if found is None:
            return None
        tried = found.slowest_workers[:PARTS_TRIED]
        named = {lowest: self._fix_worker(lowest) for lowest in tried}
        ranks = [
            rank
            for lowest in found.slowest_workers
            for rank in (named[lowest][1] if lowest in named else self._worker(lowest))
        ]
        repairs = Repairs(
            {lowest: fix.target for lowest, (fix, _) in named.items()},
            self.speedup(ranks=ranks),
            self.speedup(stages=[self.topology.pp - 1]),
        )
        return judge(found, repairs)

    def fixes(self) -> list[Fix]:
        """Return the gain of repairing each part, the best first; empty if none is worth it.

        Parts overlap: a slow rank is also part of a slow stage. Among parts with a similar gain the
        smallest comes first. Of each kind the parts that lengthen the step most are tried.
        """
        found = self.analysis
        if found is None:
            return []
        topology = self.topology
        tried = [self._fix_worker(lowest)[0] for lowest in _slowest(found.slowdown_by_worker)]
        if topology.pp > 1:
            tried += [
                Fix("stage", f"stage {stage}", self._gain(stages=[stage]))
                for stage in _slowest(found.slowdown_by_stage)
            ]
        if topology.dp > 1:
            ranks = np.arange(topology.world_size).reshape(topology.pp, topology.dp, topology.tp)
            tried += [
                Fix(
                    "dp_rank",
                    f"dp rank {dp_rank}",
                    self._gain(ranks=ranks[:, dp_rank].ravel().tolist()),
                )
                for dp_rank in _slowest(found.slowdown_by_dp_rank)
            ]
        tried += [
            Fix("optype", optype, self._gain(optypes=[optype]))
            for optype in _slowest(found.slowdown_by_optype)
        ]
        return _in_order([fix for fix in tried if fix.speedup >= WORTH_NAMING])

    def _worker(self, lowest: int) -> list[int]:
        return list(range(lowest, lowest + self.topology.tp))

    def _fix_worker(self, lowest: int) -> tuple[Fix, list[int]]:
        """Return the fix of a worker, or of its only slow rank, with the repaired ranks."""
        assert self.built is not None
        place = self.topology.coordinates(lowest)
        ranks = self._worker(lowest)
        together = self._gain(ranks=ranks)
        own = self.built.window.own[self.built.window.order.compute[place.pp_rank]]
        slowest = ranks[int(own[:, :, place.dp_rank].sum(axis=(0, 1)).argmax())]
        alone = together if len(ranks) == 1 else self._gain(ranks=[slowest])
        if alone - 1.0 >= AS_MUCH * (together - 1.0):
            return Fix("rank", f"rank {slowest}", alone), [slowest]
        return Fix("worker", f"ranks {ranks[0]}-{ranks[-1]}", together), ranks

    def _gain(self, **parts: Any) -> float:
        """Return the gain of idealizing the parts; 1.0 if it is unknown."""
        return self.speedup(**parts) or 1.0

    @cached_property
    def analysis(self) -> Analysis | None:
        """All slowdowns of the recent steps; None: they cannot be replayed."""
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
        topology = self.topology
        ranks = np.arange(0, topology.world_size, topology.tp).reshape(topology.pp, topology.dp).T
        return judge_step(
            step,
            np.array(window.steps),
            np.arange(topology.dp),
            ranks,
            float(window.recorded_seconds.mean()),
        )

    @cached_property
    def built(self) -> Built | None:
        """The prepared steps; None: they cannot be replayed."""
        window = align(self.timings, Layout(self.topology))
        if window is None:
            return None
        synchronized = ops.SYNCHRONIZED.union(ops.COMPUTE if window.coupled else ())
        try:
            model = lay_out(window.order.dependencies(), window.order.optype, synchronized)
        except TraceError:  # the clock of a rank ran backwards
            return None
        built = Built(window, model, window.times())
        recorded = float(window.recorded_seconds.mean())
        replayed = float(built.step_seconds(built.seconds).mean())
        fits = recorded / MISFIT < replayed < recorded * MISFIT
        return built if fits else None

    @cached_property
    def _now(self) -> Seconds:
        """Step times as recorded. [step]"""
        built = self.built
        return np.zeros(0) if built is None else built.step_seconds(built.seconds)

    @cached_property
    def _layers(self) -> dict[int, int]:
        """Return the layers of each part of the model, if the job reports them."""
        words = self.metadata.get("stage_layers", "").split(",")
        return {part: int(word) for part, word in enumerate(words) if word.strip().isdigit()}


@dataclass(frozen=True, slots=True)
class Built:
    """The recent steps, prepared for replay."""

    window: Window
    model: Model
    seconds: Seconds  # [operation, step, dp rank], as recorded

    def ends(self) -> Seconds:
        """[operation, step, dp rank]: in seconds since the start of the step."""
        ends = np.empty_like(self.seconds)
        ends[self.model.order] = replay(self.model, self.seconds[self.model.order])
        return ends

    def step_seconds(self, seconds: Seconds) -> Seconds:
        """Return step times for these durations of operations. [step]"""
        return step_seconds(self.model, replay(self.model, seconds[self.model.order]))


def _slowest(slowdowns: Mapping[Part, float]) -> list[Part]:
    """Return the parts that lengthen the step most, the worst first."""
    worst = sorted(slowdowns, key=lambda part: -slowdowns[part])
    return [part for part in worst[:PARTS_TRIED] if slowdowns[part] >= WORTH_NAMING]


def _in_order(fixes: list[Fix]) -> list[Fix]:
    left = sorted(fixes, key=lambda fix: -fix.speedup)
    result: list[Fix] = []
    while left:
        enough = AS_MUCH * (left[0].speedup - 1.0)
        as_good = [fix for fix in left if fix.speedup - 1.0 >= enough]
        result.append(min(as_good, key=lambda fix: KINDS.index(fix.kind)))
        left.remove(result[-1])
    return result
