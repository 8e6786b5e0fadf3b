"""The operations of a step and what each waits for, from how one pipeline of a running job did it.

No schedule is known here: the operations of a stage come in the order in which they were recorded,
and a transfer ties the stage it left to the stage it reached where that was seen to happen. Only
moments of one rank are compared with each other, so that clocks need not agree.

A stage's step is: its wait for data, its compute operations, the data-parallel reduction, the
exchange in which all stages meet, and what the rank does alone after that (`optimizer`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline_server.whatif import operations as ops
from paceline_server.whatif.columns import CLOCK_TOLERANCE_NS
from paceline_server.whatif.dependencies import Dependencies
from paceline_wire.spans import Op

COMPUTE_OPTYPES = {
    Op.FORWARD: ops.FORWARD_COMPUTE,
    Op.BACKWARD: ops.BACKWARD_COMPUTE,
    Op.BACKWARD_WEIGHT: ops.BACKWARD_WEIGHT_COMPUTE,
}


class Computed(NamedTuple):
    """A compute operation of the recorded pipeline."""

    stage: int
    op: int  # wire Op
    chunk: int
    microbatch: int
    start_ns: int
    end_ns: int

    @property
    def key(self) -> tuple[int, ...]:
        return self.stage, self.op, self.chunk, self.microbatch


class Transferred(NamedTuple):
    """A transfer of the recorded pipeline, from stage `source` to stage `target`."""

    source: int
    target: int
    op: int  # wire Op of the sender
    chunk: int
    microbatch: int
    send_start_ns: int
    send_end_ns: int
    receive_start_ns: int
    end_ns: int

    @property
    def key(self) -> tuple[int, ...]:
        return self.source, self.target, self.op, self.chunk, self.microbatch


@dataclass(slots=True)
class Order:
    """Operations by number. `stage` of a transfer is the one that sends."""

    optype: list[str] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    data_wait: list[int] = field(default_factory=list)  # by stage, as the next three
    reduction: list[int] = field(default_factory=list)
    exchange: list[int] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)
    compute: list[list[int]] = field(default_factory=list)  # by stage, in order
    compute_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    transfer_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    needs: dict[int, list[int]] = field(default_factory=dict)  # compute -> its transfers
    untimed: set[int] = field(default_factory=set)  # compute whose transfer was not seen
    # compute or reduction -> sends that held its rank up until then
    held_by: dict[int, list[int]] = field(default_factory=dict)

    def dependencies(self) -> Dependencies:
        grouped = set(self.exchange)
        alone = [[op] for op in range(len(self.optype)) if op not in grouped]
        return Dependencies(self.predecessors, [list(self.exchange), *alone])

    def add(
        self,
        optype: str,
        stage: int,
        predecessors: Sequence[int] = (),
        chunk: int = -1,
        microbatch: int = -1,
    ) -> int:
        self.optype.append(optype)
        self.stage.append(stage)
        self.chunk.append(chunk)
        self.microbatch.append(microbatch)
        self.predecessors.append(list(predecessors))
        return len(self.optype) - 1


def learn(chains: Sequence[Sequence[Computed]], transferred: Sequence[Transferred]) -> Order:
    """`chains`: what each stage computed, in order."""
    order = Order()
    for stage, chain in enumerate(chains):
        last = order.add(ops.DATA_WAIT, stage)
        order.data_wait.append(last)
        order.compute.append([])
        for one in chain:
            last = order.add(COMPUTE_OPTYPES[Op(one.op)], stage, [last], one.chunk, one.microbatch)
            order.compute_of[one.key] = last
            order.compute[-1].append(last)
        last = order.add(ops.GRADS_REDUCE_SCATTER, stage, [last])
        order.reduction.append(last)
        last = order.add(ops.CLIP, stage, [last])
        order.exchange.append(last)
        order.optimizer.append(order.add(ops.OPTIMIZER, stage, [last]))
    sides = [_Side(order, stage, chain) for stage, chain in enumerate(chains)]
    reached = _chunks_reached(sides, transferred)
    for transfer in transferred:
        way = (transfer.source, transfer.target, _compute_op(transfer), transfer.chunk)
        _tie(order, sides, transfer, reached.get(way))
    for transfer in transferred:
        _post_after_sends(order, sides[transfer.target], transfer)
    came_from = {
        (target, to_chunk, op): (source, chunk)
        for (source, target, op, chunk), to_chunk in reached.items()
    }
    _tie_unseen(order, sides, came_from or _usual_sources(order, len(sides)))
    return order


class _Side:
    """One stage as seen from its transfers."""

    def __init__(self, order: Order, stage: int, chain: Sequence[Computed]) -> None:
        self.stage = stage
        self.chain = chain
        self.places = [order.data_wait[stage], *order.compute[stage]]  # [0] is no computation
        self.starts = [one.start_ns for one in chain]
        self.ends = list(accumulate((one.end_ns for one in chain), max))
        self.index = {one.key[1:]: index for index, one in enumerate(chain)}
        # Sends that held it up, by what it did next: (end, operation).
        self.sends: dict[int, list[tuple[int, int]]] = {}

    def done_by(self, time_ns: int) -> int:
        """How many compute operations had ended."""
        return bisect_right(self.ends, time_ns + CLOCK_TOLERANCE_NS)

    def first_from(self, time_ns: int) -> int | None:
        """The first computation that began later."""
        begin = bisect_left(self.starts, time_ns - CLOCK_TOLERANCE_NS)
        return begin if begin < len(self.chain) else None

    def chunk_from(self, time_ns: int, op: int, microbatch: int) -> int | None:
        """Return the first computation of this microbatch that began later."""
        begin = self.first_from(time_ns)
        for one in self.chain[begin:] if begin is not None else ():
            if one.op == op and one.microbatch == microbatch:
                return one.chunk
        return None


def _compute_op(transfer: Transferred) -> Op:
    return Op.FORWARD if _optype(transfer) == ops.FORWARD_SEND else Op.BACKWARD


def _optype(transfer: Transferred) -> str:
    """A transfer outside of any pipeline action goes along the pipeline or back."""
    if transfer.op == Op.FORWARD_SEND:
        return ops.FORWARD_SEND
    if transfer.op == Op.BACKWARD_SEND:
        return ops.BACKWARD_SEND
    return ops.FORWARD_SEND if transfer.target > transfer.source else ops.BACKWARD_SEND


def _chunks_reached(
    sides: Sequence[_Side], transferred: Sequence[Transferred]
) -> dict[tuple[int, int, int, int], int]:
    """(source, target, op, chunk) -> the target's chunk that such transfers are for, as most show:
    by time alone, what was lost would be taken for the next of its kind."""
    votes: dict[tuple[int, int, int, int], Counter[int]] = {}
    for transfer in transferred:
        op = _compute_op(transfer)
        chunk = sides[transfer.target].chunk_from(transfer.end_ns, op, transfer.microbatch)
        if chunk is not None:
            way = (transfer.source, transfer.target, op, transfer.chunk)
            votes.setdefault(way, Counter())[chunk] += 1
    return {way: counted.most_common(1)[0][0] for way, counted in votes.items()}


def _tie(order: Order, sides: Sequence[_Side], transfer: Transferred, chunk: int | None) -> None:
    """`chunk`: the one of the target that it is for."""
    source, target = sides[transfer.source], sides[transfer.target]
    op = _compute_op(transfer)
    made = source.index.get((op, transfer.chunk, transfer.microbatch))
    sent_after = max(source.done_by(transfer.send_start_ns), 0 if made is None else made + 1)
    needed = None if chunk is None else target.index.get((op, chunk, transfer.microbatch))
    if needed is None:
        needed = target.first_from(transfer.end_ns)
    received_after = target.done_by(transfer.receive_start_ns)
    if needed is not None:
        received_after = min(received_after, needed)
    number = order.add(
        _optype(transfer),
        transfer.source,
        [source.places[sent_after], target.places[received_after]],
        transfer.chunk,
        transfer.microbatch,
    )
    order.transfer_of[transfer.key] = number
    if needed is not None:
        consumer = target.places[needed + 1]
        order.predecessors[consumer].append(number)
        order.needs.setdefault(consumer, []).append(number)
    if transfer.send_end_ns - transfer.send_start_ns > CLOCK_TOLERANCE_NS:
        _hold(order, source, transfer, number, sent_after)


def _hold(order: Order, source: _Side, transfer: Transferred, number: int, sent_after: int) -> None:
    """The next operation of the sender, a computation or the reduction, waits for the send.

    One that let go before the receiver came (the data was copied) does not depend on it.
    """
    freed = source.first_from(transfer.send_end_ns)
    if freed is not None and freed < sent_after:
        return
    held = _following(order, source, freed)
    order.held_by.setdefault(held, []).append(number)
    if transfer.send_end_ns >= transfer.receive_start_ns:
        order.predecessors[held].append(number)
        source.sends.setdefault(held, []).append((transfer.send_end_ns, number))


def _following(order: Order, side: _Side, index: int | None) -> int:
    """The computation at that place, or what comes after all of them."""
    if index is None or index >= len(side.chain):
        return order.reduction[side.stage]
    return side.places[index + 1]


def _post_after_sends(order: Order, target: _Side, transfer: Transferred) -> None:
    """A receive is posted once the sends before it have let go."""
    number = order.transfer_of[transfer.key]
    following = _following(order, target, target.done_by(transfer.receive_start_ns))
    order.predecessors[number] += [
        send
        for end_ns, send in target.sends.get(following, ())
        if end_ns <= transfer.receive_start_ns + CLOCK_TOLERANCE_NS and send != number
    ]


def _tie_unseen(
    order: Order, sides: Sequence[_Side], came_from: Mapping[tuple[int, int, int], tuple[int, int]]
) -> None:
    """A transfer that was lost, or is of a kind that was never recorded, took place all the same.

    `came_from`: (stage, chunk, op) -> stage and chunk of the computation that made its input.
    """
    for side in sides:
        for index, one in enumerate(side.chain):
            consumer = side.places[index + 1]
            origin = came_from.get((side.stage, one.chunk, one.op))
            if origin is None or consumer in order.needs:
                continue
            producer = order.compute_of.get((origin[0], one.op, origin[1], one.microbatch))
            if producer is not None:
                order.predecessors[consumer].append(producer)
                order.untimed.add(consumer)


def _usual_sources(order: Order, stages: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Chunk c of stage s is part c * stages + s of the model."""
    chunks = sorted({order.chunk[op] for chain in order.compute for op in chain})
    parts = [(stage, chunk) for chunk in chunks for stage in range(stages)]
    found = {}
    for before, after in pairwise(parts):
        found[(*after, int(Op.FORWARD))] = before
        found[(*before, int(Op.BACKWARD))] = after
    return found
