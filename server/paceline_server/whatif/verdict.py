"""The answer in one sentence: is the run slow, whose fault is it, what would fixing it give?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline_server.percent import percent
from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import Analysis

# Below this nothing is blamed: the published analysis decomposes from 3% on, too.
SLOW = 1.03

# A suspect that explains less than half of the loss is not the explanation.
EXPLAINS = 0.5


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """`kind`: none, slow_worker, stage_imbalance, slow_dp_rank, sequence_variance,
    slow_communication, host_pauses or unexplained. `target`: what it is about, where there is one.
    """

    kind: str
    target: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Repairs:
    """Replay results of a running job for the parts that a verdict may name.

    There a repaired part is as fast as its peers; in the ideal run of an analysis it takes the mean
    of all, the slow one included.
    """

    workers: Mapping[int, str] = field(default_factory=dict)  # lowest rank -> its name
    workers_speedup: float | None = None  # all that are so named repaired
    last_stage_speedup: float | None = None


def judge(analysis: Analysis, repairs: Repairs | None = None) -> ReplayVerdict:
    """`repairs`: of a running job."""
    found = _judge(analysis, repairs or Repairs())
    if found.kind == "none":
        loss = max(0.0, 1 - 1 / analysis.slowdown)
        return replace(
            found, text=f"No straggler: all of them together cost {percent(loss, '.1f')} of a step."
        )
    if repairs is None:
        lost = f"Stragglers cost {percent(1 - 1 / analysis.slowdown, '.1f')} of each step"
    else:
        lost = f"Steps take {analysis.slowdown:.2f}x as long as with the same work spread evenly"
    return replace(found, text=f"{lost}; {found.text}.")


def _judge(analysis: Analysis, repairs: Repairs) -> ReplayVerdict:
    """`text` is why."""
    if analysis.slowdown < SLOW or analysis.m_s is None or analysis.m_w is None:
        return ReplayVerdict("none", None, "")
    last = max(analysis.slowdown_by_stage)
    # With a single dp rank the last stage is a worker: imbalance is the likelier reason.
    one_pipeline = len(analysis.slowdown_by_dp_rank) == 1
    if analysis.m_w >= EXPLAINS and not (one_pipeline and analysis.m_s >= EXPLAINS):
        return _slow_workers(analysis, analysis.m_w, repairs)
    if analysis.m_s >= EXPLAINS:
        share = _explained(analysis, analysis.m_s, repairs.last_stage_speedup)
        return ReplayVerdict(
            "stage_imbalance",
            f"stage {last}",
            f"the last stage, {last}, has more to do than the others and explains {share}: move "
            "layers away from it",
        )
    return _bright(analysis) or _by_operation(analysis)


def _slow_workers(analysis: Analysis, share: float, repairs: Repairs) -> ReplayVerdict:
    ranks = analysis.slowest_workers
    names = [repairs.workers.get(rank, f"rank {rank}") for rank in ranks]
    places = "; ".join(
        f"{name} (dp rank {analysis.places[rank][0]}, stage {analysis.places[rank][1]})"
        for name, rank in zip(names[:3], ranks, strict=False)
    )
    rest = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    verb = "explains" if len(ranks) == 1 else "explain"
    explained = _explained(analysis, share, repairs.workers_speedup)
    target = ", ".join(names) if repairs.workers else "rank " + ",".join(map(str, ranks))
    return ReplayVerdict(
        "slow_worker", target, f"{places}{rest} {verb} {explained}: {_look_at(analysis)}"
    )


def _look_at(analysis: Analysis) -> str:
    waiting = analysis.slowdown_by_optype.get(ops.DATA_WAIT, 1.0)
    late = _alone(analysis, waiting) >= EXPLAINS
    return "data comes late there, look at the loader" if late else "look at the node"


def _bright(analysis: Analysis) -> ReplayVerdict | None:
    """One stage or dp rank that alone costs most of it, while no other costs half as much."""
    for kind, name, slowdowns, advice in (
        ("stage_imbalance", "stage", analysis.slowdown_by_stage, "move layers away from it"),
        ("slow_dp_rank", "dp rank", analysis.slowdown_by_dp_rank, "look at its nodes and its data"),
    ):
        worst, *others = sorted(slowdowns, key=lambda key: -slowdowns[key])
        share = _alone(analysis, slowdowns[worst])
        if others and share >= EXPLAINS and _alone(analysis, slowdowns[others[0]]) < share / 2:
            target = f"{name} {worst}"
            return ReplayVerdict(
                kind, target, f"{target} alone costs {_part(share)} of it: {advice}"
            )
    return None


def _by_operation(analysis: Analysis) -> ReplayVerdict:
    slowdowns = analysis.slowdown_by_optype
    worst = max(slowdowns, key=lambda name: slowdowns[name])
    share = _alone(analysis, slowdowns[worst])
    if worst in ops.COMPUTE and (analysis.by_microbatch or 0.0) < EXPLAINS:
        why = (
            f"no worker or stage explains it, {worst} varies everywhere ({_part(share)} of it "
            "alone), and not by microbatch, so it is not the sequence lengths: look at what else "
            "the hosts do"
        )
        return ReplayVerdict("unexplained", worst, why)
    if worst in ops.COMPUTE:
        kind = "sequence_variance"
        why = (
            f"no worker or stage explains it, {worst} varies everywhere ({_part(share)} of it "
            "alone): balance sequence lengths over microbatches and dp ranks"
        )
    elif share < EXPLAINS:
        why = (
            "no worker, stage or operation type explains half of it, the most is "
            f"{worst} with {_part(share)}"
        )
        return ReplayVerdict("unexplained", None, why)
    elif worst in (ops.GC, ops.OPTIMIZER):
        kind = "host_pauses"
        why = (
            f"{worst} pauses some workers while the others wait ({_part(share)} of it alone): do "
            "it at the same step everywhere"
        )
    else:
        kind = "slow_communication"
        why = (
            f"{worst} takes longer at times than it usually does ({_part(share)} of it alone): "
            "look at the network"
        )
    return ReplayVerdict(kind, worst, why)


def _alone(analysis: Analysis, slowdown: float) -> float:
    """Share of the loss that there is with nothing else slow."""
    return (slowdown - 1) / (analysis.slowdown - 1)


def _explained(analysis: Analysis, share: float, gain: float | None) -> str:
    """`82% of it (fixing it gives 1.17x)`. `gain`: where a replay said it."""
    if gain is None:
        lost = analysis.original_seconds - analysis.ideal_seconds
        gain = analysis.original_seconds / (analysis.original_seconds - share * lost)
    return f"{_part(share)} of it (fixing it gives {gain:.2f}x)"


def _part(share: float) -> str:
    return "all" if share >= 0.995 else percent(max(share, 0.0))
