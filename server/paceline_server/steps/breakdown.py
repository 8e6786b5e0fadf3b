"""Where each rank's step went: every nanosecond is given to exactly one part.

Spans nest (a collective inside a forward, a GC pause inside that), may overlap (another thread)
and may lie. So parts are painted: at each moment the part with the highest priority wins, all of
it clipped to the step. Parts therefore always sum to the step's duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from paceline_server.steps.columns import COMMUNICATION, Bools, Ints, Spans, one_of
from paceline_server.steps.line import Line, latest_end
from paceline_server.steps.replicas import Phases
from paceline_server.steps.timing import RankTimes
from paceline_wire.spans import COMPUTE_OPS, Flag, Op

COMPUTE = frozenset(int(op) for op in COMPUTE_OPS)


class Part(IntEnum):
    """In order of priority: the lower wins."""

    EVALUATE = 0  # contains forwards and collectives that are no training
    CHECKPOINT = 1  # contains barriers that are no training either
    GC = 2
    DATA_WAIT = 3
    TRANSFER = 4  # blocked in communication that everyone had entered
    NESTED_WAIT = 5  # blocked for a peer inside a forward or backward (tensor parallel)
    COMPUTE = 6
    PIPELINE_WAIT = 7  # blocked for another stage within the pipeline phase: the bubble
    OUTER_WAIT = 8  # blocked for a peer outside of it
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
SPANS_AT_A_TIME = 1 << 16  # of 10,240 ranks' million all at once took twice as long
# Which part wins where several are asked for, by their bits.
_WINNER = np.array(
    [_NOTHING] + [(bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(Part))],
    dtype=np.int8,
)


@dataclass(frozen=True, slots=True)
class Intervals:
    """Stretches of the line, and the part that each asks for."""

    begin: Ints
    end: Ints
    part: Ints
    owner: Ints


@dataclass(frozen=True, slots=True)
class Painted:
    """`part_ns`: one row per part, one column per rank. `self_ns`: of each span asked about."""

    part_ns: Ints
    self_ns: Ints


def compute_rows(spans: Spans, line: Line) -> Ints:
    """Forwards and backwards of training (not those of an evaluation between two steps)."""
    chosen = one_of(spans.op, COMPUTE)
    evaluating = spans.op == Op.EVALUATE
    if evaluating.any():
        begin, end = line.span_begin, line.span_end
        chosen &= latest_end(begin[evaluating], end[evaluating], begin) < end
    rows: Ints = np.flatnonzero(chosen)
    return rows


def break_down(
    spans: Spans,
    wait_ns: Ints,
    line: Line,
    phases: Phases,
    compute: Ints,
    at_a_time: int = SPANS_AT_A_TIME,
) -> Painted:
    """The parts of all ranks' steps, and the COMPUTE within each of the spans `compute`.

    Ranks have nothing to do with each other here: those that hold about `at_a_time` spans are done
    together, so that what is worked on stays in the processor's cache.
    """
    wanted = np.arange(0, len(spans), at_a_time)
    cuts = np.unique(np.append(np.searchsorted(line.first, wanted), len(line)))
    painted = []
    for begin, end in pairwise(cuts.tolist()):
        ranks, part = slice(begin, end), slice(line.first[begin], line.first[end])
        rows = compute[slice(*np.searchsorted(compute, (part.start, part.stop)))]
        some = Spans(spans.table[:, part])
        painted.append(_paint(some, wait_ns[part], phases.of_rows(ranks), rows - part.start))
    return Painted(
        np.concatenate([each.part_ns for each in painted], axis=1),
        np.concatenate([each.self_ns for each in painted]),
    )


def _paint(spans: Spans, wait_ns: Ints, phases: Phases, compute: Ints) -> Painted:
    line = Line(spans)
    asked = _asked(spans, wait_ns, line, phases)
    begin, end = line.begin[asked.owner], line.end[asked.owner]
    clipped = Intervals(
        np.clip(asked.begin, begin, end),
        np.clip(asked.end, begin, end),
        asked.part,
        asked.owner,
    )
    return paint(clipped, len(line), line.span_begin[compute], line.span_end[compute])


def rank_times(spans: Spans, line: Line, painted: Painted) -> RankTimes:
    """The parts as people and detectors know them."""
    seconds = painted.part_ns / 1e9
    total = (line.end_ns - line.begin_ns) / 1e9
    hooked = np.zeros(len(line), dtype=np.bool_)
    hooked[line.owner[one_of(spans.op, COMPUTE)]] = True
    # A loop without microbatch hooks: what nothing else explains is its compute.
    rest = np.maximum(total - seconds.sum(axis=0), 0.0)
    compute = np.where(hooked, seconds[Part.COMPUTE], rest)
    wait = seconds[Part.NESTED_WAIT] + seconds[Part.OUTER_WAIT]
    return RankTimes(
        rank=line.ranks,
        start_ns=line.begin_ns,
        end_ns=line.end_ns,
        step_seconds=total,
        self_seconds=compute,
        compute_seconds=compute,
        communication_seconds=seconds[Part.TRANSFER] + wait,
        wait_seconds=wait,
        bubble_seconds=seconds[Part.PIPELINE_WAIT] + seconds[Part.PIPELINE_GAP],
        data_wait_seconds=seconds[Part.DATA_WAIT],
        optimizer_seconds=seconds[Part.OPTIMIZER],
        checkpoint_seconds=seconds[Part.CHECKPOINT],
        gc_seconds=seconds[Part.GC],
    )


def _asked(spans: Spans, wait_ns: Ints, line: Line, phases: Phases) -> Intervals:
    part = _PART_OF_OP[spans.op]
    simple = np.flatnonzero(part >= 0)
    blocked = np.flatnonzero(one_of(spans.op, COMMUNICATION) & ((spans.flags & Flag.ASYNC) == 0))
    start, end = line.span_begin[blocked], line.span_end[blocked]
    ready = line.place(line.owner[blocked], spans.start_ns[blocked] + wait_ns[blocked])
    waiting = ready > start
    owner = line.owner[blocked]
    computing = np.flatnonzero(part == Part.COMPUTE)
    nested = start < latest_end(line.span_begin[computing], line.span_end[computing], start)
    inner, outer = waiting & nested, waiting & ~nested
    everyone = np.arange(len(line))
    phase_begin = line.place(everyone, phases.begin_ns)
    phase_end = line.place(everyone, phases.end_ns)
    stage_begin, stage_end = phase_begin[owner[outer]], phase_end[owner[outer]]
    pieces: list[tuple[Ints, Ints, Ints, Ints]] = [
        (line.span_begin[simple], line.span_end[simple], part[simple], line.owner[simple]),
        (ready, end, _all(Part.TRANSFER, owner), owner),
        (start[inner], ready[inner], _all(Part.NESTED_WAIT, owner[inner]), owner[inner]),
        (start[outer], ready[outer], _all(Part.OUTER_WAIT, owner[outer]), owner[outer]),
        (
            np.clip(start[outer], stage_begin, stage_end),
            np.clip(ready[outer], stage_begin, stage_end),
            _all(Part.PIPELINE_WAIT, owner[outer]),
            owner[outer],
        ),
        (phase_begin, phase_end, _all(Part.PIPELINE_GAP, everyone), everyone),
    ]
    return Intervals(
        np.concatenate([begin for begin, _, _, _ in pieces]),
        np.concatenate([end for _, end, _, _ in pieces]),
        np.concatenate([part for _, _, part, _ in pieces]),
        np.concatenate([owner for _, _, _, owner in pieces]),
    )


def _all(part: Part, like: Ints) -> Ints:
    return np.full(like.size, part, dtype=np.int64)


def paint(asked: Intervals, owners: int, begin: Ints, end: Ints) -> Painted:
    """Nanoseconds won by each part of each owner, lower part numbers first.

    `begin` and `end`: intervals of which to tell how much of each COMPUTE won.
    """
    keep = asked.end > asked.begin
    part = asked.part[keep].astype(np.int8)
    edges = np.concatenate([asked.begin[keep], asked.end[keep]])
    order = np.argsort(edges, kind="stable")  # of several runs that are sorted already
    edges = edges[order]
    if not edges.size:
        return Painted(np.zeros((len(Part), owners), np.int64), np.zeros(begin.size, np.int64))
    opens = order < part.size
    edge_part = np.concatenate([part, part])[order]
    winner = _WINNER[np.cumsum(_changes(edge_part, opens))][:-1]
    length = np.diff(edges)
    owner = np.concatenate([asked.owner[keep]] * 2)[order][:-1]
    won = winner < _NOTHING
    cell = winner[won] * np.int64(owners) + owner[won]
    part_ns = np.bincount(cell, weights=length[won], minlength=len(Part) * owners)
    computed = np.concatenate([[0], np.cumsum(np.where(winner == Part.COMPUTE, length, 0))])
    return Painted(
        part_ns.astype(np.int64).reshape(len(Part), owners),
        _at(edges, computed, end) - _at(edges, computed, begin),
    )


def _changes(edge_part: npt.NDArray[np.int8], opens: Bools) -> npt.NDArray[np.int32]:
    """At each edge: the bit of a part that begins, minus that of one that ends there.

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
    """A running total, known at the edges, at moments that are edges or lie outside of them."""
    place = np.searchsorted(edges, moment)
    found: Ints = total[np.minimum(place, edges.size - 1)]
    return found
