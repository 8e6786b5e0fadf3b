"""Break each rank's step down into parts: every nanosecond belongs to exactly one part.

Spans nest (a collective inside a forward, a GC pause inside that), may overlap (another thread) and
may be wrong. At each moment the claiming part with the highest priority gets the time, clipped to
the step. So the parts always sum to the step's duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from paceline_server.steps.columns import CHUNK, COMMUNICATION, Bools, Ints, Spans, one_of
from paceline_server.steps.overlap import overlapped_seconds
from paceline_server.steps.replicas import ReplicaPhases
from paceline_server.steps.timeline import StepTimeline, latest_end
from paceline_server.steps.timing import Floats, RankTimes
from paceline_wire.spans import COMPUTE_OPS, Flag, Op

COMPUTE = frozenset(int(op) for op in COMPUTE_OPS)


class Part(IntEnum):
    """The parts of a step, in order of priority: the lowest number wins."""

    EVALUATE = 0  # contains forwards and collectives that are not training
    CHECKPOINT = 1  # contains barriers that are not training either
    GC = 2
    DATA_WAIT = 3
    TRANSFER = 4  # blocked in communication that all participants had entered
    NESTED_WAIT = 5  # blocked for a peer inside a forward or backward (tensor parallel)
    COMPUTE = 6
    PIPELINE_WAIT = 7  # blocked for another stage within the pipeline phase: the bubble
    OUTER_WAIT = 8  # blocked for a peer outside the pipeline phase
    OPTIMIZER = 9
    PIPELINE_GAP = 10  # nothing recorded, within the pipeline phase


_BY_OP = {
    Op.EVALUATE: Part.EVALUATE,
    Op.CHECKPOINT: Part.CHECKPOINT,
    Op.GC: Part.GC,
    Op.DATA_WAIT: Part.DATA_WAIT,
    Op.OPTIMIZER: Part.OPTIMIZER,
}
_PART_OF_OP = np.full(1 << 16, -1, dtype=np.int64)
for _op, _part in _BY_OP.items():
    _PART_OF_OP[_op] = _part
for _compute_op in COMPUTE:
    _PART_OF_OP[_compute_op] = Part.COMPUTE
_NOTHING = len(Part)
SPANS_AT_A_TIME = 1 << 16  # a million spans of 10,240 ranks at once took twice as long
# The part that wins among several, by their bits.
_WINNER = np.array(
    [_NOTHING] + [(bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(Part))],
    dtype=np.int8,
)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals on the timeline, and the part that each claims."""

    begin: Ints
    end: Ints
    part: Ints
    owner: Ints


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The parts of a step.

    `part_ns`: one row per part, one column per rank. `self_ns`: one value per requested span.
    """

    part_ns: Ints
    self_ns: Ints


def is_marked(microbatch: Ints, chunk: Ints) -> Bools:
    """Return which forwards and backwards a script or schedule marked.

    The others were recognized from autograd: they need not cover all that the rank computes.
    """
    marked: Bools = (microbatch >= 0) | (chunk >= 0)
    return marked


def compute_rows(spans: Spans, timeline: StepTimeline) -> Ints:
    """Return the rows of forwards and backwards of training, without those of evaluations."""
    chosen = one_of(spans.op, COMPUTE)
    evaluating = spans.op == Op.EVALUATE
    if evaluating.any():
        begin, end = timeline.span_begin, timeline.span_end
        chosen &= latest_end(begin[evaluating], end[evaluating], begin) < end
    rows: Ints = np.flatnonzero(chosen)
    return rows


def break_down(
    spans: Spans,
    wait_ns: Ints,
    timeline: StepTimeline,
    phases: ReplicaPhases,
    compute: Ints,
    at_a_time: int = SPANS_AT_A_TIME,
) -> Breakdown:
    """Return the parts of all ranks' steps, and the COMPUTE time in each of the rows `compute`.

    Ranks are independent here. They are processed in groups of about `at_a_time` spans, so that the
    data stays in the processor's cache.
    """
    wanted = np.arange(0, len(spans), at_a_time)
    cuts = np.unique(np.append(np.searchsorted(timeline.first, wanted), len(timeline)))
    breakdowns = []
    for begin, end in pairwise(cuts.tolist()):
        ranks, chosen = slice(begin, end), slice(timeline.first[begin], timeline.first[end])
        rows = compute[slice(*np.searchsorted(compute, (chosen.start, chosen.stop)))]
        some = Spans(spans.table[:, chosen])
        breakdowns.append(
            _break_down_some(some, wait_ns[chosen], phases.of_rows(ranks), rows - chosen.start)
        )
    return Breakdown(
        np.concatenate([part.part_ns for part in breakdowns], axis=1),
        np.concatenate([part.self_ns for part in breakdowns]),
    )


def _break_down_some(
    spans: Spans, wait_ns: Ints, phases: ReplicaPhases, compute: Ints
) -> Breakdown:
    timeline = StepTimeline(spans)
    claims = _claims(spans, wait_ns, timeline, phases)
    begin, end = timeline.begin[claims.owner], timeline.end[claims.owner]
    clipped = Intervals(
        np.clip(claims.begin, begin, end),
        np.clip(claims.end, begin, end),
        claims.part,
        claims.owner,
    )
    return allocate(
        clipped, len(timeline), timeline.span_begin[compute], timeline.span_end[compute]
    )


def rank_times(
    spans: Spans, wait_ns: Ints, timeline: StepTimeline, breakdown: Breakdown, routed: Ints
) -> RankTimes:
    """Return the parts in the form that users and detectors get; `routed` as in `waits`."""
    seconds = breakdown.part_ns / 1e9
    total_ns = timeline.end_ns - timeline.begin_ns
    rows = np.flatnonzero(one_of(spans.op, COMPUTE | {int(Op.OPTIMIZER)}))
    hooked, on_device = np.zeros((2, len(timeline)), dtype=np.bool_)
    on_device[timeline.owner[rows[(spans.flags[rows] & Flag.DEVICE) != 0]]] = True
    rows = rows[spans.op[rows] != Op.OPTIMIZER]
    rows = rows[is_marked(spans.microbatch[rows], spans.row(CHUNK)[rows])]
    hooked[timeline.owner[rows]] = True
    # In a loop without microbatch hooks, unexplained time counts as compute.
    rest = np.maximum(total_ns - breakdown.part_ns.sum(axis=0), 0) / 1e9
    compute = seconds[Part.COMPUTE] + np.where(hooked, 0.0, rest)
    # On a device, an optimizer that exchanges what it updates waits for its peers unseen.
    optimizer = np.where(on_device, 0.0, seconds[Part.OPTIMIZER])
    wait = seconds[Part.NESTED_WAIT] + seconds[Part.OUTER_WAIT]
    blocked = seconds[Part.TRANSFER] + wait + seconds[Part.PIPELINE_WAIT] > 0.0
    outside = rest + seconds[Part.PIPELINE_GAP] + optimizer
    host = np.where(hooked & blocked & ~on_device, outside, 0.0)
    waited = _waited_in_evaluations(spans, wait_ns, timeline)
    waited = np.minimum(waited, seconds[Part.EVALUATE])
    return RankTimes(
        rank=timeline.ranks,
        start_ns=timeline.begin_ns,
        end_ns=timeline.end_ns,
        step_seconds=total_ns / 1e9,
        self_seconds=compute + np.where(hooked, 0.0, optimizer),
        compute_seconds=compute,
        communication_seconds=seconds[Part.TRANSFER] + wait,
        wait_seconds=wait,
        bubble_seconds=seconds[Part.PIPELINE_WAIT] + seconds[Part.PIPELINE_GAP],
        data_wait_seconds=seconds[Part.DATA_WAIT],
        optimizer_seconds=seconds[Part.OPTIMIZER],
        checkpoint_seconds=seconds[Part.CHECKPOINT],
        evaluation_seconds=seconds[Part.EVALUATE] - waited,
        evaluation_wait_seconds=waited,
        gc_seconds=seconds[Part.GC],
        host_seconds=host,
        overlapped_seconds=overlapped_seconds(spans, timeline),
        routed_bytes=np.bincount(timeline.owner[routed], spans.bytes[routed], len(timeline)).astype(
            np.int64
        ),
    )


def _waited_in_evaluations(spans: Spans, wait_ns: Ints, timeline: StepTimeline) -> Floats:
    """Return the seconds for which each rank waited for others inside its evaluations."""
    evaluating = spans.op == Op.EVALUATE
    if not evaluating.any():
        return np.zeros(len(timeline))
    begin, end = timeline.span_begin, timeline.span_end
    inside = one_of(spans.op, COMMUNICATION) & ((spans.flags & Flag.ASYNC) == 0)
    inside &= begin < latest_end(begin[evaluating], end[evaluating], begin)
    waited = np.bincount(timeline.owner[inside], wait_ns[inside], len(timeline))
    seconds: Floats = waited / 1e9
    return seconds


def _claims(
    spans: Spans, wait_ns: Ints, timeline: StepTimeline, phases: ReplicaPhases
) -> Intervals:
    part = _PART_OF_OP[spans.op]
    simple = np.flatnonzero(part >= 0)
    blocked = np.flatnonzero(one_of(spans.op, COMMUNICATION) & ((spans.flags & Flag.ASYNC) == 0))
    start, end = timeline.span_begin[blocked], timeline.span_end[blocked]
    ready = timeline.place(timeline.owner[blocked], spans.start_ns[blocked] + wait_ns[blocked])
    waiting = ready > start
    owner = timeline.owner[blocked]
    computing = np.flatnonzero(part == Part.COMPUTE)
    nested = start < latest_end(timeline.span_begin[computing], timeline.span_end[computing], start)
    inner, outer = waiting & nested, waiting & ~nested
    all_rows = np.arange(len(timeline))
    phase_begin = timeline.place(all_rows, phases.begin_ns)
    phase_end = timeline.place(all_rows, phases.end_ns)
    stage_begin, stage_end = phase_begin[owner[outer]], phase_end[owner[outer]]
    pieces: list[tuple[Ints, Ints, Ints, Ints]] = [
        (
            timeline.span_begin[simple],
            timeline.span_end[simple],
            part[simple],
            timeline.owner[simple],
        ),
        (ready, end, _all(Part.TRANSFER, owner), owner),
        (start[inner], ready[inner], _all(Part.NESTED_WAIT, owner[inner]), owner[inner]),
        (start[outer], ready[outer], _all(Part.OUTER_WAIT, owner[outer]), owner[outer]),
        (
            np.clip(start[outer], stage_begin, stage_end),
            np.clip(ready[outer], stage_begin, stage_end),
            _all(Part.PIPELINE_WAIT, owner[outer]),
            owner[outer],
        ),
        (phase_begin, phase_end, _all(Part.PIPELINE_GAP, all_rows), all_rows),
    ]
    return Intervals(
        np.concatenate([begin for begin, _, _, _ in pieces]),
        np.concatenate([end for _, end, _, _ in pieces]),
        np.concatenate([part for _, _, part, _ in pieces]),
        np.concatenate([owner for _, _, _, owner in pieces]),
    )


def _all(part: Part, like: Ints) -> Ints:
    return np.full(like.size, part, dtype=np.int64)


def allocate(claims: Intervals, owners: int, begin: Ints, end: Ints) -> Breakdown:
    """Return the nanoseconds of each part of each owner; lower part numbers win.

    `begin` and `end`: intervals for which to return the time that went to COMPUTE.
    """
    keep = claims.end > claims.begin
    part = claims.part[keep].astype(np.int8)
    edges = np.concatenate([claims.begin[keep], claims.end[keep]])
    order = np.argsort(edges, kind="stable")  # merges runs that are sorted already
    edges = edges[order]
    if not edges.size:
        return Breakdown(np.zeros((len(Part), owners), np.int64), np.zeros(begin.size, np.int64))
    opens = order < part.size
    edge_part = np.concatenate([part, part])[order]
    winner = _WINNER[np.cumsum(_changes(edge_part, opens))][:-1]
    length = np.diff(edges)
    owner = np.concatenate([claims.owner[keep]] * 2)[order][:-1]
    won = winner < _NOTHING
    cell = winner[won] * np.int64(owners) + owner[won]
    part_ns = np.bincount(cell, weights=length[won], minlength=len(Part) * owners)
    computed = np.concatenate([[0], np.cumsum(np.where(winner == Part.COMPUTE, length, 0))])
    return Breakdown(
        part_ns.astype(np.int64).reshape(len(Part), owners),
        _at(edges, computed, end) - _at(edges, computed, begin),
    )


def _changes(edge_part: npt.NDArray[np.int8], opens: Bools) -> npt.NDArray[np.int32]:
    """Return at each edge the bit of a part that begins, minus that of a part that ends.

    Intervals of one part may overlap; it lasts from the first's begin to the last's end.
    """
    changes = np.zeros(edge_part.size, dtype=np.int32)
    for part in range(len(Part)):
        where = np.flatnonzero(edge_part == part)
        if not where.size:
            continue
        opening = opens[where]
        depth = np.cumsum(np.where(opening, 1, -1))
        changes[where[opening & (depth == 1)]] = 1 << part
        changes[where[~opening & (depth == 0)]] = -(1 << part)
    return changes


def _at(edges: Ints, total: Ints, moment: Ints) -> Ints:
    """Return a running total, known at the edges, at times that are edges or outside of them."""
    place = np.searchsorted(edges, moment)
    found: Ints = total[np.minimum(place, edges.size - 1)]
    return found
