"""The answer in one sentence: is the run slow, whose fault is it, what would fixing it give?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import Analysis

# Below this nothing is blamed: the published analysis decomposes from 3 % on, too.
SLOW = 1.03

# A suspect that explains less than half of the loss is not the explanation.
EXPLAINS = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind`: none, slow_worker, stage_imbalance, slow_dp_rank, sequence_variance,
    slow_communication, host_pauses or unexplained. `target`: what it is about, where there is one.
    """

    kind: str
    target: str | None
    text: str


def judge(analysis: Analysis) -> Verdict:
    if analysis.slowdown < SLOW or analysis.m_s is None or analysis.m_w is None:
        loss = max(0.0, 1 - 1 / analysis.slowdown)
        return Verdict(
            "none", None, f"No straggler: all of them together cost {loss:.1%} of a step."
        )
    last = max(analysis.slowdown_by_stage)
    # With a single dp rank the last stage is a worker: imbalance is the likelier reason.
    one_pipeline = len(analysis.slowdown_by_dp_rank) == 1
    if analysis.m_w >= EXPLAINS and not (one_pipeline and analysis.m_s >= EXPLAINS):
        return _slow_workers(analysis, analysis.m_w)
    if analysis.m_s >= EXPLAINS:
        return _verdict(
            analysis,
            "stage_imbalance",
            f"stage {last}",
            f"the last stage, {last}, has more to do than the others and explains "
            f"{_explained(analysis, analysis.m_s)}: move layers away from it",
        )
    return _bright(analysis) or _by_operation(analysis)


def _slow_workers(analysis: Analysis, share: float) -> Verdict:
    ranks = analysis.slowest_workers
    places = "; ".join(
        f"rank {rank} (dp rank {analysis.places[rank][0]}, stage {analysis.places[rank][1]})"
        for rank in ranks[:3]
    )
    rest = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    verb = "explains" if len(ranks) == 1 else "explain"
    return _verdict(
        analysis,
        "slow_worker",
        "rank " + ",".join(str(rank) for rank in ranks),
        f"{places}{rest} {verb} {_explained(analysis, share)}: {_look_at(analysis)}",
    )


def _look_at(analysis: Analysis) -> str:
    waiting = analysis.slowdown_by_optype.get(ops.DATA_WAIT, 1.0)
    late = _alone(analysis, waiting) >= EXPLAINS
    return "data comes late there, look at the loader" if late else "look at the node"


def _bright(analysis: Analysis) -> Verdict | None:
    """One stage or dp rank that alone costs most of it, while no other costs half as much."""
    for kind, name, slowdowns, advice in (
        ("stage_imbalance", "stage", analysis.slowdown_by_stage, "move layers away from it"),
        ("slow_dp_rank", "dp rank", analysis.slowdown_by_dp_rank, "look at its nodes and its data"),
    ):
        worst, *others = sorted(slowdowns, key=lambda key: -slowdowns[key])
        share = _alone(analysis, slowdowns[worst])
        if others and share >= EXPLAINS and _alone(analysis, slowdowns[others[0]]) < share / 2:
            target = f"{name} {worst}"
            why = f"{target} alone costs {_part(share)} of it: {advice}"
            return _verdict(analysis, kind, target, why)
    return None


def _by_operation(analysis: Analysis) -> Verdict:
    slowdowns = analysis.slowdown_by_optype
    worst = max(slowdowns, key=lambda name: slowdowns[name])
    share = _alone(analysis, slowdowns[worst])
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
        return _verdict(analysis, "unexplained", None, why)
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
    return _verdict(analysis, kind, worst, why)


def _alone(analysis: Analysis, slowdown: float) -> float:
    """Share of the loss that there is with nothing else slow."""
    return (slowdown - 1) / (analysis.slowdown - 1)


def _explained(analysis: Analysis, share: float) -> str:
    """`82% of it (fixing it gives 1.17x)`."""
    lost = analysis.original_seconds - analysis.ideal_seconds
    gain = analysis.original_seconds / (analysis.original_seconds - share * lost)
    return f"{_part(share)} of it (fixing it gives {gain:.2f}x)"


def _part(share: float) -> str:
    return "all" if share >= 0.995 else f"{max(share, 0.0):.0%}"


def _verdict(analysis: Analysis, kind: str, target: str | None, why: str) -> Verdict:
    loss = 1 - 1 / analysis.slowdown
    return Verdict(kind, target, f"Stragglers cost {loss:.1%} of each step; {why}.")
