"""Pipeline schedules as data: the list of actions of one stage in one step.

A schedule defines the order of the forwards and backwards of a stage; `plan` adds the receives
before and the sends after them. `pipeline` executes any such list, so a new schedule is a new
function in SCHEDULES.

The model is a sequence of parts, and chunk c of stage s is part c * stages + s: with several chunks
per stage, the last stage sends to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from paceline_wire.spans import Op


class ScheduleAction(NamedTuple):
    """One action of a stage.

    Printed as `F3` or `SEND_B0`, with a suffix such as `.1` for other chunks than 0.
    """

    op: Op
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_SHORT[self.op]}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class ScheduleShape(NamedTuple):
    """The dimensions of a schedule; `chunks` is per stage."""

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
    """Yield all forwards, then all backwards (arXiv:1811.06965)."""
    for microbatch in range(shape.microbatches):
        yield ScheduleAction(Op.FORWARD, microbatch)
    for microbatch in range(shape.microbatches):
        yield ScheduleAction(Op.BACKWARD, microbatch)


def one_forward_one_backward(stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """Yield 1F1B: fill the pipeline, then alternate, holding at most `stages - stage` microbatches.

    Source: PipeDream-Flush, arXiv:2006.09503, section 3.
    """
    order = range(shape.microbatches)
    forwards = (ScheduleAction(Op.FORWARD, microbatch) for microbatch in order)
    backwards = (ScheduleAction(Op.BACKWARD, microbatch) for microbatch in order)
    yield from _alternate(forwards, backwards, ahead=shape.stages - stage - 1)


def interleaved(stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """Yield 1F1B over several chunks: rounds of `stages` microbatches through one chunk after
    another.

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
    """Yield `ahead` forwards, then one forward and one backward alternately."""
    yield from islice(forwards, ahead)
    for backward in backwards:
        yield from islice(forwards, 1)
        yield backward


def forward_only(_stage: int, shape: ScheduleShape) -> Iterator[ScheduleAction]:
    """Yield only forwards, for evaluation."""
    for chunk in range(shape.chunks):
        for microbatch in range(shape.microbatches):
            yield ScheduleAction(Op.FORWARD, microbatch, chunk)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def plan(schedule: Schedule, stage: int, shape: ScheduleShape) -> list[ScheduleAction]:
    """Return the actions of `stage` in one step, with the receives and sends they need.

    Sends never block (see `pipeline`), so only the order of the receives matters. Receives from a
    stage are in the order in which that stage sends, even if a later action needs them: both ranks
    then use equal transfer numbers, and no receive blocks on a tensor that is sent later. This
    matters for two stages with several chunks, which send both activations and gradients to each
    other.
    """
    sent = {peer: _sent(schedule, peer, stage, shape) for peer in range(shape.stages)}
    received: set[ScheduleAction] = set()
    result: list[ScheduleAction] = []
    for action in schedule(stage, shape):
        source = _neighbor(action, stage, shape, -1)
        if source is not None:
            wanted = ScheduleAction(_RECEIVE[action.op], action.microbatch, action.chunk)
            while wanted not in received:
                result.append(sent[source[0]].popleft())
                received.add(result[-1])
        result.append(action)
        if _neighbor(action, stage, shape, 1) is not None:
            result.append(ScheduleAction(_SEND[action.op], action.microbatch, action.chunk))
    return result


def _sent(schedule: Schedule, stage: int, to: int, shape: ScheduleShape) -> deque[ScheduleAction]:
    """Return the receives of stage `to` from `stage`, in the order of sending."""
    receives = deque[ScheduleAction]()
    for action in schedule(stage, shape):
        sink = _neighbor(action, stage, shape, 1)
        if sink is not None and sink[0] == to:
            receives.append(ScheduleAction(_RECEIVE[action.op], action.microbatch, sink[1]))
    return receives


def _neighbor(
    action: ScheduleAction, stage: int, shape: ScheduleShape, side: int
) -> tuple[int, int] | None:
    """Return (stage, chunk) of an action's input (`side` -1) or output (1).

    None at the ends of the model.
    """
    direction = side if action.op == Op.FORWARD else -side
    part = action.chunk * shape.stages + stage + direction
    if not 0 <= part < shape.stages * shape.chunks:
        return None
    chunk, neighbor = divmod(part, shape.stages)
    return neighbor, chunk
