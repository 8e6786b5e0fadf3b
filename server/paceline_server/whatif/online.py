"""What-if replay of the steps a running generation took last: what would fixing this give?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from paceline_server.steps.timing import StepTiming
from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import Analysis, Step, ideal_seconds, judge_step
from paceline_server.whatif.columns import Layout
from paceline_server.whatif.errors import TraceError
from paceline_server.whatif.fixes import Fixes
from paceline_server.whatif.model import Model, lay_out
from paceline_server.whatif.order import COMPUTE_OPTYPES
from paceline_server.whatif.replay import Seconds, replay, step_seconds
from paceline_server.whatif.schedules import Action, Actions
from paceline_server.whatif.verdict import judge
from paceline_server.whatif.window import Window, align
from paceline_wire.topology import Topology

# A replay that takes so many times what was recorded, or so much less, is of another job.
MISFIT = 1.5


class WhatIf(msgspec.Struct, frozen=True):
    """Where the recent steps' slowness comes from; 1.0 is none. See docs/what-if.md."""

    slowdown: float
    by_optype: dict[str, float]
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    m_s: float | None  # share of the loss that the last stage explains
    m_w: float | None  # share that the slowest workers explain
    slowest_workers: tuple[int, ...]  # their lowest ranks, slowest first
    first_step: int
    last_step: int
    verdict: str


class RunReplay:
    """The recent steps, replayed with parts of them as fast as their peers.

    Built when it is first asked for; all times are those of the replay, in seconds.
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
        excess_seconds: Mapping[int, float] | None = None,
        since_step: int | None = None,
    ) -> float | None:
        """Step time now over step time with these idealised: 1.21 is 21 % gained.

        `excess_seconds`: per rank, time per step to take away outside of the model's operations
        (data wait, GC, checkpoint). `since_step`: leave out earlier steps, in which it was not yet
        so; all steps count if none is left. None: the steps cannot be replayed, or what is asked
        about has no peers.
        """
        built = self.built
        if built is None:
            return None
        fixes = Fixes(built.window, built.seconds, self._layers)
        fixes.idealise_ranks(ranks)
        fixes.idealise_stages(stages)
        fixes.idealise_links(links)
        fixes.take_away(excess_seconds or {})
        if fixes.without_peers:
            return None
        counted = np.array(built.window.steps) >= (-1 if since_step is None else since_step)
        if not counted.any():
            counted[:] = True
        fixed = float(built.step_seconds(fixes.seconds)[counted].mean())
        return float(self._now[counted].mean()) / fixed if fixed > 0 else None

    def actions(self) -> Actions | None:
        """The schedule that was carried out; microbatches without a number are counted."""
        if self.built is None:
            return None
        order = self.built.window.order
        ops_of = {optype: op for op, optype in COMPUTE_OPTYPES.items()}
        return [
            [
                Action(ops_of[order.optype[op]], order.microbatch[op], max(order.chunk[op], 0))
                for op in chain
            ]
            for chain in order.compute
        ]

    def summary(self) -> WhatIf | None:
        """Everything at once, for the Job page; None: the steps cannot be replayed."""
        found, built = self.analysis, self.built
        if found is None or built is None:
            return None
        return WhatIf(
            slowdown=found.slowdown,
            by_optype=found.slowdown_by_optype,
            by_stage=found.slowdown_by_stage,
            by_dp_rank=found.slowdown_by_dp_rank,
            m_s=found.m_s,
            m_w=found.m_w,
            slowest_workers=found.slowest_workers,
            first_step=min(built.window.steps),
            last_step=max(built.window.steps),
            verdict=judge(found).text,
        )

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
        step = Step(model, optype, stage, recorded, ideal_seconds(optype, recorded))
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
        """None: the steps cannot be replayed."""
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
        """[step]: as recorded."""
        built = self.built
        return np.zeros(0) if built is None else built.step_seconds(built.seconds)

    @cached_property
    def _layers(self) -> dict[int, int]:
        """Of each part of the model, where the job says it."""
        words = self.metadata.get("stage_layers", "").split(",")
        return {part: int(word) for part, word in enumerate(words) if word.strip().isdigit()}


@dataclass(frozen=True, slots=True)
class Built:
    """The recent steps, made ready for replay."""

    window: Window
    model: Model
    seconds: Seconds  # [operation, step, dp rank], as recorded

    def ends(self) -> Seconds:
        """[operation, step, dp rank]: in seconds since the start of the step."""
        ends = np.empty_like(self.seconds)
        ends[self.model.order] = replay(self.model, self.seconds[self.model.order])
        return ends

    def step_seconds(self, seconds: Seconds) -> Seconds:
        """[step]: step times if operations take so long."""
        return step_seconds(self.model, replay(self.model, seconds[self.model.order]))
