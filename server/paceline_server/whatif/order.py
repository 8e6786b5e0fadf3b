"""The operations of a step and their dependencies, derived from one pipeline of a running job.

No schedule is assumed. The operations of a stage have the order in which they were recorded, and a
transfer connects an operation of its source stage with an operation of its target stage. Timestamps
are compared only within one rank, so the clocks of different ranks need not agree.

The step of a stage consists of the data wait, the compute operations, the data-parallel reduction,
the exchange in which all stages synchronize, and the rank's own work after it (`optimizer`).
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
    op: int  # Op of the wire format
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
    op: int  # the sender's Op of the wire format
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
    """The operations of a step, by number, and their dependencies.

    The `stage` of a transfer is the sending stage.
    """

    optype: list[str] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    # One operation per stage:
    data_wait: list[int] = field(default_factory=list)
    reduction: list[int] = field(default_factory=list)
    exchange: list[int] = field(default_factory=list)
    optimizer: list[int] = field(default_factory=list)
    compute: list[list[int]] = field(default_factory=list)  # by stage, in order
    compute_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    transfer_of: dict[tuple[int, ...], int] = field(default_factory=dict)
    # by compute operation: its input transfers
    inputs: dict[int, list[int]] = field(default_factory=dict)
    # compute operations without their input transfer
    unrecorded_input: set[int] = field(default_factory=set)
    # by compute operation or reduction: sends that must end before the rank can start it
    blocking_sends: dict[int, list[int]] = field(default_factory=dict)

    def dependencies(self) -> Dependencies:
        grouped = set(self.exchange)
        singles = [[op] for op in range(len(self.optype)) if op not in grouped]
        return Dependencies(self.predecessors, [list(self.exchange), *singles])

    def add_operation(
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
    """Return the order of a pipeline.

    Args:
        chains: the compute operations of each stage, in order.
        transferred: the transfers between the stages.
    """
    order = Order()
    for stage, chain in enumerate(chains):
        last = order.add_operation(ops.DATA_WAIT, stage)
        order.data_wait.append(last)
        order.compute.append([])
        for computed in chain:
            optype = COMPUTE_OPTYPES[Op(computed.op)]
            last = order.add_operation(optype, stage, [last], computed.chunk, computed.microbatch)
            order.compute_of[computed.key] = last
            order.compute[-1].append(last)
        last = order.add_operation(ops.GRADS_REDUCE_SCATTER, stage, [last])
        order.reduction.append(last)
        last = order.add_operation(ops.CLIP, stage, [last])
        order.exchange.append(last)
        order.optimizer.append(order.add_operation(ops.OPTIMIZER, stage, [last]))
    stages = [_StageChain(order, stage, chain) for stage, chain in enumerate(chains)]
    target_chunks = _target_chunks(stages, transferred)
    for transfer in transferred:
        route = (transfer.source, transfer.target, _compute_op(transfer), transfer.chunk)
        _add_transfer(order, stages, transfer, target_chunks.get(route))
    for transfer in transferred:
        _receive_after_sends(order, stages[transfer.target], transfer)
    origins = {
        (target, to_chunk, op): (source, chunk)
        for (source, target, op, chunk), to_chunk in target_chunks.items()
    }
    _add_unrecorded_transfers(order, stages, origins or _default_origins(order, len(stages)))
    return order


class _StageChain:
    """The compute operations of one stage in order, searchable by time and by microbatch.

    An index counts compute operations; `operations[index + 1]` is the operation's number.
    """

    def __init__(self, order: Order, stage: int, chain: Sequence[Computed]) -> None:
        self.stage = stage
        self.chain = chain
        self.operations = [order.data_wait[stage], *order.compute[stage]]
        self.starts = [computed.start_ns for computed in chain]
        self.ends = list(accumulate((computed.end_ns for computed in chain), max))
        self.index = {computed.key[1:]: index for index, computed in enumerate(chain)}
        # Sends that block this stage, by the operation that they delay: (end, send).
        self.sends: dict[int, list[tuple[int, int]]] = {}

    def ended_by(self, time_ns: int) -> int:
        """Return the number of compute operations that had ended by this time."""
        return bisect_right(self.ends, time_ns + CLOCK_TOLERANCE_NS)

    def first_from(self, time_ns: int) -> int | None:
        """Return the index of the first compute operation that started after this time."""
        first = bisect_left(self.starts, time_ns - CLOCK_TOLERANCE_NS)
        return first if first < len(self.chain) else None

    def chunk_from(self, time_ns: int, op: int, microbatch: int) -> int | None:
        """Return the chunk of the microbatch's first operation that started after this time."""
        first = self.first_from(time_ns)
        for computed in self.chain[first:] if first is not None else ():
            if computed.op == op and computed.microbatch == microbatch:
                return computed.chunk
        return None


def _compute_op(transfer: Transferred) -> Op:
    return Op.FORWARD if _optype(transfer) == ops.FORWARD_SEND else Op.BACKWARD


def _optype(transfer: Transferred) -> str:
    """Return the type of a send.

    A transfer that no pipeline action recorded is a forward send if it goes to a later stage.
    """
    if transfer.op == Op.FORWARD_SEND:
        return ops.FORWARD_SEND
    if transfer.op == Op.BACKWARD_SEND:
        return ops.BACKWARD_SEND
    return ops.FORWARD_SEND if transfer.target > transfer.source else ops.BACKWARD_SEND


def _target_chunks(
    stages: Sequence[_StageChain], transferred: Sequence[Transferred]
) -> dict[tuple[int, int, int, int], int]:
    """Return, by (source, target, op, chunk), the chunk of the target stage that uses the data.

    The chunk is the one that most transfers of a route indicate. A single transfer may indicate the
    wrong one: if the operation that used its data was not recorded, a later one seems to use it.
    """
    votes: dict[tuple[int, int, int, int], Counter[int]] = {}
    for transfer in transferred:
        op = _compute_op(transfer)
        chunk = stages[transfer.target].chunk_from(transfer.end_ns, op, transfer.microbatch)
        if chunk is not None:
            route = (transfer.source, transfer.target, op, transfer.chunk)
            votes.setdefault(route, Counter())[chunk] += 1
    return {route: counted.most_common(1)[0][0] for route, counted in votes.items()}


def _add_transfer(
    order: Order, stages: Sequence[_StageChain], transfer: Transferred, target_chunk: int | None
) -> None:
    """Add a transfer and its dependencies on both stages.

    `target_chunk`: the chunk of the target stage that uses the data, if known.
    """
    source, target = stages[transfer.source], stages[transfer.target]
    op = _compute_op(transfer)
    producer = source.index.get((op, transfer.chunk, transfer.microbatch))
    sent_after = max(
        source.ended_by(transfer.send_start_ns), 0 if producer is None else producer + 1
    )
    user = None
    if target_chunk is not None:
        user = target.index.get((op, target_chunk, transfer.microbatch))
    if user is None:
        user = target.first_from(transfer.end_ns)
    received_after = target.ended_by(transfer.receive_start_ns)
    if user is not None:
        received_after = min(received_after, user)
    number = order.add_operation(
        _optype(transfer),
        transfer.source,
        [source.operations[sent_after], target.operations[received_after]],
        transfer.chunk,
        transfer.microbatch,
    )
    order.transfer_of[transfer.key] = number
    if user is not None:
        consumer = target.operations[user + 1]
        order.predecessors[consumer].append(number)
        order.inputs.setdefault(consumer, []).append(number)
    if transfer.send_end_ns - transfer.send_start_ns > CLOCK_TOLERANCE_NS:
        _add_blocking_send(order, source, transfer, number, sent_after)


def _add_blocking_send(
    order: Order, source: _StageChain, transfer: Transferred, number: int, sent_after: int
) -> None:
    """Make the sender's next operation (compute or reduction) wait for the end of the send.

    A send that ended before the receive was posted (the data was copied to a buffer) does not
    depend on the receiver, so the replay does not let the sender wait for the transfer.
    """
    following = source.first_from(transfer.send_end_ns)
    if following is not None and following < sent_after:
        return
    blocked = _operation_at(order, source, following)
    order.blocking_sends.setdefault(blocked, []).append(number)
    if transfer.send_end_ns >= transfer.receive_start_ns:
        order.predecessors[blocked].append(number)
        source.sends.setdefault(blocked, []).append((transfer.send_end_ns, number))


def _operation_at(order: Order, stage: _StageChain, index: int | None) -> int:
    """Return the compute operation at this index, or the reduction after the last one."""
    if index is None or index >= len(stage.chain):
        return order.reduction[stage.stage]
    return stage.operations[index + 1]


def _receive_after_sends(order: Order, target: _StageChain, transfer: Transferred) -> None:
    """Make a transfer wait for the blocking sends of its receiver that ended before it."""
    number = order.transfer_of[transfer.key]
    following = _operation_at(order, target, target.ended_by(transfer.receive_start_ns))
    order.predecessors[number] += [
        send
        for end_ns, send in target.sends.get(following, ())
        if end_ns <= transfer.receive_start_ns + CLOCK_TOLERANCE_NS and send != number
    ]


def _add_unrecorded_transfers(
    order: Order,
    stages: Sequence[_StageChain],
    origins: Mapping[tuple[int, int, int], tuple[int, int]],
) -> None:
    """Make compute operations without a recorded input transfer wait for their producer.

    `origins`: by (stage, chunk, op), the stage and chunk of the operation that produces its input.
    """
    for stage in stages:
        for index, computed in enumerate(stage.chain):
            consumer = stage.operations[index + 1]
            origin = origins.get((stage.stage, computed.chunk, computed.op))
            if origin is None or consumer in order.inputs:
                continue
            producer = order.compute_of.get(
                (origin[0], computed.op, origin[1], computed.microbatch)
            )
            if producer is not None:
                order.predecessors[consumer].append(producer)
                order.unrecorded_input.add(consumer)


def _default_origins(order: Order, stages: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return the origins if chunk c of stage s is part c * stages + s of the model."""
    chunks = sorted({order.chunk[op] for chain in order.compute for op in chain})
    parts = [(stage, chunk) for chunk in chunks for stage in range(stages)]
    origins = {}
    for before, after in pairwise(parts):
        origins[(*after, int(Op.FORWARD))] = before
        origins[(*before, int(Op.BACKWARD))] = after
    return origins
