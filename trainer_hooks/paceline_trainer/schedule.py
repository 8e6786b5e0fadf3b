"""Pipeline schedules as data: the list of actions that one stage carries out in one step.

A schedule decides the order of the forwards and backwards of a stage; `plan` puts the receives
before and the sends after them. The executor (`pipeline`) runs any such list, so another schedule
is another function in SCHEDULES.

The model is a row of parts, and chunk c of stage s is part c * stages + s: with several chunks
per stage, the last stage sends on to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from paceline_wire.spans import Op


class ScheduleAction(NamedTuple):
    """One thing a stage does; printed as `F3`, `SEND_B0`; `.1` names a chunk other than 0."""

    op: Op
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_SHORT[self.op]}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class ScheduleShape(NamedTuple):
    """What a schedule is made for; `chunks` per stage."""

    stages: int
    microbatches: int
    chunks: int = 1


Schedule = Callable[
    [int, ScheduleShape], Iterator[ScheduleAction]
]  # the forwards and backwards of one stage

_SHORT = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.FORWARD_SEND: "SEND_F",
    Op.FORWARD_RECV: "RECV_F",
    Op.BACKWARD_SEND: "SEND_B",
    Op.BACKWARD_RECV: "RECV_B",
}
_RECEIVE = {Op.FORWARD: Op.FORWARD_RECV, Op.BACKWARD: Op.BACKWARD_RECV}
_SEND = {Op.FORWARD: Op.FORWARD_SEND, Op.BACKWARD: Op.BACKWARD_SEND}


def gpipe(_stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    for microbatch in range(shape.microbatches):
        yield ScheduleAction(Op.FORWARD, microbatch)
    for microbatch in range(shape.microbatches):
        yield ScheduleAction(Op.BACKWARD, microbatch)


def one_forward_one_backward(stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """Fill the pipeline, then alternate: at most `stages - stage` microbatches are held at once.

    Source: PipeDream-Flush, arXiv:2006.09503, section 3.
    """
    order = range(shape.microbatches)
    forwards = (ScheduleAction(Op.FORWARD, microbatch) for microbatch in order)
    backwards = (ScheduleAction(Op.BACKWARD, microbatch) for microbatch in order)
    yield from _alternate(forwards, backwards, ahead=shape.stages - stage - 1)


def interleaved(stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """1F1B over several chunks: rounds of `stages` microbatches, each through chunk after chunk.

    The number of microbatches must be a multiple of `stages`. Source: Narayanan et al.,
    arXiv:2104.04473, section 2.2.
    """
    stages, microbatches, chunks = shape
    turns = [
        (first + place, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for place in range(stages)
    ]
    forwards = (ScheduleAction(Op.FORWARD, microbatch, chunk) for microbatch, chunk in turns)
    backwards = (
        ScheduleAction(Op.BACKWARD, microbatch, chunks - 1 - chunk) for microbatch, chunk in turns
    )
    yield from _alternate(
        forwards, backwards, ahead=2 * (stages - stage - 1) + (chunks - 1) * stages
    )


def _alternate(
    forwards: Iterator[ScheduleAction], backwards: Iterator[ScheduleAction], ahead: int
) -> Iterator[ScheduleAction]:
    """`ahead` forwards, then one forward, one backward, until there are none left."""
    yield from islice(forwards, ahead)
    for backward in backwards:
        yield from islice(forwards, 1)
        yield backward


def forward_only(_stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """For evaluation."""
    for chunk in range(shape.chunks):
        for microbatch in range(shape.microbatches):
            yield ScheduleAction(Op.FORWARD, microbatch, chunk)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def plan(schedule: Schedule, stage: int, shape: ScheduleShape) -> list[ScheduleAction]:
    """What `stage` does in one step: receive what each action needs, send on what it makes.

    Sends never block (see `pipeline`), so the order of the receives decides everything. From each
    stage they come in the order in which it sends, even where one is needed later: two ranks then
    number their transfers alike, and nothing can block, as what is sent earlier is there earlier.
    Only two stages with several chunks each send one another both activations and gradients.
    """
    sent = {peer: _sent(schedule, peer, stage, shape) for peer in range(shape.stages)}
    received: set[ScheduleAction] = set()
    result: list[ScheduleAction] = []
    for action in schedule(stage, shape):
        source = _neighbour(action, stage, shape, -1)
        if source is not None:
            wanted = ScheduleAction(_RECEIVE[action.op], action.microbatch, action.chunk)
            while wanted not in received:
                result.append(sent[source[0]].popleft())
                received.add(result[-1])
        result.append(action)
        if _neighbour(action, stage, shape, 1) is not None:
            result.append(ScheduleAction(_SEND[action.op], action.microbatch, action.chunk))
    return result


def _sent(schedule: Schedule, stage: int, to: int, shape: ScheduleShape) -> deque[ScheduleAction]:
    """The receives that what `stage` sends means for stage `to`, in the order of sending."""
    receives = deque[ScheduleAction]()
    for action in schedule(stage, shape):
        sink = _neighbour(action, stage, shape, 1)
        if sink is not None and sink[0] == to:
            receives.append(ScheduleAction(_RECEIVE[action.op], action.microbatch, sink[1]))
    return receives


def _neighbour(
    action: ScheduleAction, stage: int, shape: ScheduleShape, side: int
) -> tuple[int, int] | None:
    """Stage and chunk that an action's input is from (`side` -1) or its output for (1)."""
    direction = side if action.op == Op.FORWARD else -side
    part = action.chunk * shape.stages + stage + direction
    if not 0 <= part < shape.stages * shape.chunks:
        return None
    chunk, neighbour = divmod(part, shape.stages)
    return neighbour, chunk
