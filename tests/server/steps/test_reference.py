"""The vectorized breakdown equals a slow, naive one of each single rank."""

from collections import defaultdict

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline_server.steps.breakdown import SPANS_AT_A_TIME, Part, break_down, compute_rows
from paceline_server.steps.columns import FIELDS, Spans, concatenate
from paceline_server.steps.grid import grid_of
from paceline_server.steps.groups import Groups
from paceline_server.steps.replicas import ReplicaPhases
from paceline_server.steps.timeline import StepTimeline
from paceline_server.steps.waits import COLLECTIVES, RECEIVES, TRANSFERS, communication
from paceline_wire.ring import GroupDefinition
from paceline_wire.spans import COMMUNICATION_OPS, COMPUTE_OPS, Flag, Op
from paceline_wire.topology import Topology

TOPOLOGY = Topology(dp=2, pp=2, tp=1)
LAST = 40  # moments are 0..LAST, and some lie outside
OPS = (
    Op.FORWARD, Op.BACKWARD, Op.FORWARD_SEND, Op.FORWARD_RECV, Op.ALL_REDUCE, Op.BARRIER,
    Op.DATA_WAIT, Op.OPTIMIZER, Op.CHECKPOINT, Op.GC, Op.EVALUATE,
)  # fmt: skip

Row = tuple[int, ...]  # op, start, duration, flags, peer, sequence, group
rows = st.lists(
    st.tuples(
        st.sampled_from(OPS),
        st.integers(-10, LAST + 10),
        st.integers(0, 25),
        st.sampled_from((0, 0, Flag.ASYNC, Flag.WAIT)),
        st.integers(0, TOPOLOGY.world_size - 1),
        st.integers(0, 3),
        st.integers(0, 2),
    ),
    max_size=12,
)
step = st.tuples(st.integers(0, 10), st.integers(1, LAST - 10))


def table(rank: int, own: list[Row]) -> Spans:
    columns = np.zeros((FIELDS, len(own)), dtype=np.int64)
    for index, (op, start, duration, flags, peer, sequence, group) in enumerate(own):
        columns[:, index] = [
            rank, index, op, group, -1, flags, 0, -1, peer, 0, sequence, start, duration,
        ]  # fmt: skip
    return Spans(columns)


def groups() -> Groups:
    """Groups in which id 1 is a "dp" group of two ranks for every rank; id 2 is undefined."""
    known = Groups(TOPOLOGY.world_size)
    for rank in range(TOPOLOGY.world_size):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        known.add(rank, GroupDefinition(1, "dp", pair, "dp"))
    return known


def obvious_waits(spans: Spans, known: Groups) -> list[int]:
    meetings: dict[object, list[int]] = defaultdict(list)
    entered: dict[object, list[int]] = defaultdict(list)
    names: list[object] = []
    for rank, op, group, flags, peer, sequence, start, duration in each(spans):
        name: object = None
        if sequence > 0 and op in COLLECTIVES and (key := known.key(rank, group)) is not None:
            name = (key, sequence)
            if not flags & Flag.WAIT:
                meetings[name].append(duration)
        elif sequence > 0 and op in TRANSFERS:
            ends = (peer, rank) if op in RECEIVES else (rank, peer)
            name = (*ends, sequence)
            entered[name, op in RECEIVES].append(start)
        names.append(name)
    waits = []
    for name, (_, op, _, _, _, _, start, duration) in zip(names, each(spans), strict=True):
        wait = 0
        if op in COLLECTIVES and len(meetings.get(name, ())) > 1:
            wait = max(duration - min(meetings[name]), 0)
        elif op in TRANSFERS and name is not None:
            others = entered.get((name, op not in RECEIVES))
            if others:
                wait = min(max(min(others) - start, 0), duration)
            elif op in RECEIVES:
                wait = duration
        waits.append(wait)
    return waits


def each(spans: Spans) -> list[tuple[int, ...]]:
    fields = (
        spans.rank, spans.op, spans.group, spans.flags, spans.peer, spans.sequence,
        spans.start_ns, spans.duration_ns,
    )  # fmt: skip
    return list(zip(*(field.tolist() for field in fields), strict=True))


def obvious_winners(
    own: list[tuple[int, ...]], waits: list[int], interval: range, phase: range
) -> dict[int, Part]:
    """Return the part that wins at each time on one rank."""
    winners = {}
    simple = {
        Op.EVALUATE: Part.EVALUATE, Op.CHECKPOINT: Part.CHECKPOINT, Op.GC: Part.GC,
        Op.DATA_WAIT: Part.DATA_WAIT, Op.OPTIMIZER: Part.OPTIMIZER,
        **dict.fromkeys(COMPUTE_OPS, Part.COMPUTE),
    }  # fmt: skip
    computing = [(start, start + long) for _, op, *_, start, long in own if op in COMPUTE_OPS]
    for moment in interval:
        asked = [Part.PIPELINE_GAP] if moment in phase else []
        for (_, op, _, flags, _, _, start, duration), wait in zip(own, waits, strict=True):
            if not start <= moment < start + duration:
                continue
            if op in simple:
                asked.append(simple[Op(op)])
            elif op in COMMUNICATION_OPS and not flags & Flag.ASYNC:
                if moment >= start + wait:
                    asked.append(Part.TRANSFER)
                elif any(begin <= start < end for begin, end in computing):
                    asked.append(Part.NESTED_WAIT)
                else:
                    asked.append(Part.PIPELINE_WAIT if moment in phase else Part.OUTER_WAIT)
        if asked:
            winners[moment] = min(asked)
    return winners


def training(own: list[tuple[int, ...]]) -> list[range]:
    """Return the times of each microbatch outside evaluations."""
    found = [(op, start, start + long) for _, op, *_, start, long in own]
    evaluations = [(start, end) for op, start, end in found if op == Op.EVALUATE]
    return [
        range(start, end)
        for op, start, end in found
        if op in COMPUTE_OPS and not any(a <= start and end <= b for a, b in evaluations)
    ]


@settings(max_examples=150)
@given(
    st.lists(st.tuples(step, rows), min_size=4, max_size=4),
    st.sampled_from([1, 5, SPANS_AT_A_TIME]),
)
@example([((0, 1), [(op, -1, 0, 0, 0, 0, 0) for op in (Op.FORWARD, Op.DATA_WAIT)])] * 4, 1)
def test_parts_and_waits_equal_those_computed_rank_by_rank(played, at_a_time):
    ends = [start + length for (start, length), _ in played]
    per_rank = [
        table(rank, [*own, (Op.STEP, *whole, 0, 0, 0, 0)])
        for rank, (whole, own) in enumerate(played)
    ]
    spans = concatenate(per_rank)
    timeline, known = StepTimeline(spans), groups()
    compute = compute_rows(spans, timeline)
    phases = ReplicaPhases.of(spans, timeline, compute, grid_of(TOPOLOGY))
    met = communication(spans, known)
    painted = break_down(spans, met.wait_ns, timeline, phases, compute, at_a_time)

    waits = obvious_waits(spans, known)
    assert met.wait_ns.tolist() == waits
    busy = {replica: [] for replica in range(TOPOLOGY.dp)}
    for rank, own in enumerate(per_rank):
        busy[rank % TOPOLOGY.dp] += training(each(own))
    position = 0
    for rank, own in enumerate(per_rank):
        found = each(own)
        data = [start for _, op, *_, start, _ in found if op == Op.DATA_WAIT]
        begin = min([played[rank][0][0], *data])
        microbatches = busy[rank % TOPOLOGY.dp]
        phase = range(0)
        if microbatches:
            phase = range(min(m.start for m in microbatches), max(m.stop for m in microbatches))
        rank_waits = waits[position : position + len(found)]
        winners = obvious_winners(found, rank_waits, range(begin, ends[rank]), phase)
        won = [list(winners.values()).count(part) for part in Part]
        assert painted.part_ns[:, rank].tolist() == won
        computing = [moment for moment, part in winners.items() if part == Part.COMPUTE]
        assert painted.self_ns[timeline.owner[compute] == rank].tolist() == [
            sum(moment in one for moment in computing) for one in training(found)
        ]
        position += len(found)
