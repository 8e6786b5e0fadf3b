"""The result of an analysis in one sentence: the slowdown, its cause and the gain of a fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline_server.percent import percent
from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import Analysis

# Below this slowdown no cause is reported. The published analysis uses the same limit of 3%.
SLOW = 1.03

# A part is reported as the cause if it explains at least this share of the slowdown.
EXPLAINS = 0.5


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """The verdict of a replay.

    `kind`: none, slow_worker, stage_imbalance, slow_dp_rank, sequence_variance, slow_data,
    slow_communication, host_pauses or unexplained. `target`: the slow part of the job, if any.
    """

    kind: str
    target: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Repairs:
    """Gains of fixing the parts that a verdict may name, from the replay of a running job.

    In these replays a fixed part is as fast as its peers. In the ideal run of an `Analysis` it
    takes the mean over all parts, including the slow one.
    """

    workers: Mapping[int, str] = field(default_factory=dict)  # by lowest rank: name of the worker
    workers_speedup: float | None = None  # with all slowest workers fixed
    last_stage_speedup: float | None = None


def judge(analysis: Analysis, repairs: Repairs | None = None) -> ReplayVerdict:
    """Return the verdict; `repairs` is only for a running job."""
    verdict = _find_cause(analysis, repairs or Repairs())
    share = percent(max(0.0, 1 - 1 / analysis.slowdown), ".1f")
    if verdict.kind == "none":
        text = f"No straggler: uneven operation times cost only {share} of step time."
        return replace(verdict, text=text)
    if repairs is None:
        cost = f"Stragglers cost {share} of step time"
    else:
        cost = f"Steps take {analysis.slowdown:.2f}x as long as with evenly distributed work"
    return replace(verdict, text=f"{cost}; {verdict.text}.")


def _find_cause(analysis: Analysis, repairs: Repairs) -> ReplayVerdict:
    """Return the verdict with only the cause as its `text`."""
    if analysis.slowdown < SLOW or analysis.m_w is None:
        return ReplayVerdict("none", None, "")
    m_s = analysis.m_s or 0.0
    last = max(analysis.slowdown_by_stage)
    # With a single dp rank the last stage is one worker: imbalance is the more likely cause.
    one_pipeline = len(analysis.slowdown_by_dp_rank) == 1
    # Faster workers of a stage that is slow as a whole gain nothing: their replicas are as slow.
    are_in_last = all(analysis.places[rank][1] == last for rank in analysis.slowest_workers)
    of_last_stage = m_s >= EXPLAINS and analysis.m_w > m_s / 2 and are_in_last
    if (analysis.m_w >= EXPLAINS or of_last_stage) and not (one_pipeline and m_s >= EXPLAINS):
        return _slow_workers(analysis, analysis.m_w, repairs)
    if m_s >= EXPLAINS:
        share = _explained(analysis, m_s, repairs.last_stage_speedup)
        return ReplayVerdict(
            "stage_imbalance",
            f"stage {last}",
            f"the last stage (stage {last}) has more work than the others and explains {share}: "
            "move layers to other stages",
        )
    return _single_part(analysis) or _operation_type(analysis)


def _slow_workers(analysis: Analysis, share: float, repairs: Repairs) -> ReplayVerdict:
    ranks = analysis.slowest_workers
    names = [repairs.workers.get(rank, f"rank {rank}") for rank in ranks]
    places = "; ".join(
        f"{name} ({_place(analysis, rank)})" for name, rank in zip(names[:3], ranks, strict=False)
    )
    others = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    verb = "explains" if len(ranks) == 1 else "explain"
    explained = _explained(analysis, share, repairs.workers_speedup)
    target = ", ".join(names) if repairs.workers else "rank " + ",".join(map(str, ranks))
    return ReplayVerdict(
        "slow_worker", target, f"{places}{others} {verb} {explained}: {_worker_advice(analysis)}"
    )


def _place(analysis: Analysis, rank: int) -> str:
    dp_rank, stage = analysis.places[rank]
    has_stages = len(analysis.slowdown_by_stage) > 1
    return f"dp rank {dp_rank}, stage {stage}" if has_stages else f"dp rank {dp_rank}"


def _worker_advice(analysis: Analysis) -> str:
    waiting = analysis.slowdown_by_optype.get(ops.DATA_WAIT, 1.0)
    data_is_late = _share_alone(analysis, waiting) >= EXPLAINS
    return "data arrives late, check the data loader" if data_is_late else "check the node"


def _single_part(analysis: Analysis) -> ReplayVerdict | None:
    """Return a verdict on one stage or dp rank, if no other one costs at least half as much."""
    for kind, name, slowdowns, advice in (
        ("stage_imbalance", "stage", analysis.slowdown_by_stage, "move layers to other stages"),
        ("slow_dp_rank", "dp rank", analysis.slowdown_by_dp_rank, "check its nodes and its data"),
    ):
        worst, *others = sorted(slowdowns, key=lambda key: -slowdowns[key])
        share = _share_alone(analysis, slowdowns[worst])
        if (
            others
            and share >= EXPLAINS
            and _share_alone(analysis, slowdowns[others[0]]) < share / 2
        ):
            target = f"{name} {worst}"
            why = f"{target} alone causes {_percent(share)} of the slowdown: {advice}"
            return ReplayVerdict(kind, target, why)
    return None


def _operation_type(analysis: Analysis) -> ReplayVerdict:
    """Return a verdict on the operation type that costs most."""
    slowdowns = analysis.slowdown_by_optype
    worst = max(slowdowns, key=lambda name: slowdowns[name])
    share = _share_alone(analysis, slowdowns[worst])
    if worst in ops.COMPUTE and (analysis.by_microbatch or 0.0) < EXPLAINS:
        why = (
            f"{worst} times vary on all workers and stages and cause {_percent(share)} of the "
            "slowdown, but not by microbatch, so sequence lengths are not the cause: check what "
            "else runs on the hosts"
        )
        return ReplayVerdict("unexplained", worst, why)
    if worst in ops.COMPUTE:
        kind = "sequence_variance"
        why = (
            f"{worst} times vary by microbatch on all workers and stages and cause "
            f"{_percent(share)} of the slowdown: balance sequence lengths across microbatches and "
            "dp ranks"
        )
    elif share < EXPLAINS:
        why = (
            "no worker, stage or operation type explains half of the slowdown; the largest share "
            f"is {worst} with {_percent(share)}"
        )
        return ReplayVerdict("unexplained", None, why)
    elif worst in (ops.GC, ops.OPTIMIZER):
        kind = "host_pauses"
        why = (
            f"{worst} pauses some workers while the others wait and causes {_percent(share)} of "
            "the slowdown: run it in the same step on all ranks"
        )
    elif worst == ops.DATA_WAIT:
        kind = "slow_data"
        why = (
            f"data arrives late on changing ranks and causes {_percent(share)} of the slowdown: "
            "check the data loaders and their storage"
        )
    else:
        kind = "slow_communication"
        why = (
            f"{worst} sometimes takes longer than usual and causes {_percent(share)} of the "
            "slowdown: check the network"
        )
    return ReplayVerdict(kind, worst, why)


def _share_alone(analysis: Analysis, slowdown: float) -> float:
    """Return the share of the slowdown that remains if only this part is slow."""
    return (slowdown - 1) / (analysis.slowdown - 1)


def _explained(analysis: Analysis, share: float, gain: float | None) -> str:
    """Return text such as `82% of the slowdown (fixing it gives 1.17x)`.

    `gain`: the speedup found by a replay; None: computed from `share`.
    """
    if gain is None:
        lost = analysis.original_seconds - analysis.ideal_seconds
        gain = analysis.original_seconds / (analysis.original_seconds - share * lost)
    return f"{_percent(share)} of the slowdown (fixing it gives {gain:.2f}x)"


def _percent(share: float) -> str:
    return "all" if share >= 0.995 else percent(max(share, 0.0))
