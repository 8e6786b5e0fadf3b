"""The goodput of one step: the time that it needed on healthy peers, and the time that it lost.

The same definition as the speedups of a running job: a slower rank costs what `RunReplay.speedup`
gains if it is as fast as its peers. It is a straggler if it is reported as one. If not, the ranks
are imbalanced: one has more to do by design, its data is longer, or it paused once. The lost time
is taken from where it was measured: the longer compute of the slow rank, the waits of the others,
and the bubble. So the parts of a step sum to its duration as before. Evaluations, and the waits
inside them, are lost as well. A slow link costs what its report says, taken from the transfers
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from paceline_server.steps.columns import Bools
from paceline_server.steps.grid import grid_of
from paceline_server.steps.timing import Floats, Ints, StepTiming
from paceline_server.steps.types import StageBubble, StepGoodput, StepSummary
from paceline_server.whatif.online import RunReplay
from paceline_wire.topology import Topology


def step_goodput(
    summary: StepSummary,
    timing: StepTiming,
    topology: Topology,
    metadata: Mapping[str, str],
    straggler_slowdown: float,
    stragglers: Mapping[int, float] = MappingProxyType({}),
    link_cost_ratio: float = 0.0,
) -> StepGoodput:
    """Return the goodput of a step.

    Args:
        straggler_slowdown: a rank whose self time is this multiple of its peers' is slow.
        stragglers: ranks that are reported as stragglers, with the reported slowdown. It counts for
            a rank without peers, such as the only one of its stage.
        link_cost_ratio: share of the step time that a healthy link would save (what-if).
    """
    ranks = timing.ranks
    alone = np.array([rank.slowdown is None for rank in summary.ranks])
    slowdown = np.array([rank.slowdown or stragglers.get(rank.rank, 1.0) for rank in summary.ranks])
    slow = slowdown >= straggler_slowdown
    excess = np.where(slow, ranks.self_seconds * (1.0 - 1.0 / slowdown), 0.0)
    stage = grid_of(topology).stage[ranks.rank]
    reported = slow & np.isin(ranks.rank, list(stragglers))
    replay = RunReplay((timing,), topology, metadata)

    def speedup_without(fixed: Bools) -> float:
        if not fixed.any():
            return 1.0
        own = np.flatnonzero(fixed & alone)
        found = replay.speedup(
            ranks=ranks.rank[fixed & ~alone].tolist(),
            excess_seconds={int(ranks.rank[row]): float(excess[row]) for row in own},
        )
        return max(found or _least_speedup(excess * fixed, stage, summary.duration_seconds), 1.0)

    speedup = speedup_without(slow)
    of_reported = speedup if (reported == slow).all() else speedup_without(reported)
    scheduled = ranks.bubble_seconds * _scheduled_shares(summary.bubbles, stage)
    scheduled *= (1.0 - link_cost_ratio) / speedup
    beyond = float((ranks.bubble_seconds - scheduled).mean())
    waits = float(ranks.wait_seconds.mean())
    longer = float(excess.mean())
    lost = summary.duration_seconds * (1.0 - 1.0 / speedup)
    # A straggler that no other rank waits for, and whose work is not on the critical path, costs
    # nothing; more than what was measured cannot be lost.
    computing = min(lost, longer, float(ranks.compute_seconds.mean()))
    waiting = min(lost - computing, waits + beyond)
    transfers = float(ranks.communication_seconds.mean()) - waits
    links = min(summary.duration_seconds * link_cost_ratio, transfers + waits + beyond - waiting)
    transferring = min(links, transfers)
    unneeded = waiting + links - transferring
    left = 1.0 - unneeded / (waits + beyond) if unneeded else 1.0
    by_stragglers = (computing + waiting) * _share_of_loss(of_reported, speedup)
    return StepGoodput(
        compute_seconds=float(ranks.compute_seconds.mean()) - computing,
        communication_seconds=transfers - transferring,
        bubble_seconds=float(scheduled.mean()),
        straggler_seconds=by_stragglers,
        imbalance_seconds=computing + waiting - by_stragglers,
        peer_wait_seconds=waits * left + float(ranks.evaluation_wait_seconds.mean()),
        bubble_excess_seconds=beyond * left,
        slow_link_seconds=links,
        evaluation_seconds=float(ranks.evaluation_seconds.mean()),
    )


def _share_of_loss(of_some: float, of_all: float) -> float:
    """Return the share of the time lost to all slow ranks that a repair of some of them saves."""
    lost = 1.0 - 1.0 / of_all
    return min((1.0 - 1.0 / of_some) / lost, 1.0) if lost > 0.0 else 0.0


def _least_speedup(excess: Floats, stage: Ints, step_seconds: float) -> float:
    """Return the speedup without a replay: each stage waits for its slowest rank."""
    by_stage = np.zeros(int(stage.max()) + 1)
    np.maximum.at(by_stage, stage, excess)
    needed = step_seconds - float(by_stage.sum())
    return step_seconds / needed if needed > 0 else 1.0


def _scheduled_shares(bubbles: list[StageBubble], stage: Ints) -> Floats:
    """Return for each rank the share of its bubble that its schedule has in theory."""
    shares = np.ones(max([int(stage.max()), *(bubble.stage for bubble in bubbles)]) + 1)
    for bubble in bubbles:
        if bubble.theory_ratio is not None and bubble.measured_ratio > bubble.theory_ratio:
            shares[bubble.stage] = bubble.theory_ratio / bubble.measured_ratio
    rows: Floats = shares[stage]
    return rows
