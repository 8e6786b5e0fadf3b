"""Start and end of every operation of a step, computed from durations and dependencies.

All steps of a range, all replicas and all tensor-parallel ranks are computed at once, in one pass
over the program's moves: arrays have the shape (steps, dp, tp). Each step ends with an exchange of
all ranks, so steps are independent; times are seconds since the end of the previous exchange. An
operation that never ends has the time infinity: this is how a rank hangs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_evaluation.program import Move, StepProgram
from paceline_evaluation.shape import JobShape
from paceline_wire.spans import RECEIVE_OPS, Op

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Durations:
    """Durations in seconds. Axes: steps, (pp,) dp, tp, unless noted otherwise."""

    compute: list[Floats]  # by stage: (computes, steps, dp, tp)
    transfer: Floats  # (transfers, steps, dp, tp)
    tensor: list[Floats]  # by stage: (computes, steps, dp, 1)
    gc: Floats  # GC pauses during the rank's compute number `gc_place`
    gc_place: npt.NDArray[np.int64]
    data: Floats
    reduction: Floats  # (steps, pp, 1, tp)
    gather: Floats  # as `reduction`; ZeRO's gather of the updated parameters
    world: Floats  # (steps,)
    optimizer: Floats
    after_pipeline: Floats  # between the last microbatch and the reduction; usually 0
    checkpoint: Floats  # (steps,)
    extra: Floats  # as `reduction`: a second reduction before it; NaN: none in this step


@dataclass(slots=True)
class Timeline:
    """Start and end of each row of each stage: (rows, steps, dp, tp)."""

    start: list[Floats]
    end: list[Floats]
    step_seconds: Floats  # (steps,) from one exchange to the next
    carry: Floats  # (pp, dp, tp): start of the next step after the last exchange


def play(shape: JobShape, program: StepProgram, durations: Durations, carry: Floats) -> Timeline:
    """Compute a range of steps. `carry`: start of its first step, from the previous range."""
    player = _Player(shape, program, durations)
    player.begin(carry)
    for move in program.moves:
        if move.action.op in RECEIVE_OPS:
            player.receive(move)
        elif move.action.op in (Op.FORWARD_SEND, Op.BACKWARD_SEND):
            player.start[move.stage][move.row] = player.free[move.stage]
        else:
            player.compute(move)
    return player.finish()


class _Player:
    def __init__(self, shape: JobShape, program: StepProgram, durations: Durations) -> None:
        topology = shape.topology
        self.program, self.durations = program, durations
        self.steps = durations.world.size
        each = (self.steps, topology.dp, topology.tp)
        self.start = [np.full((len(rows), *each), np.inf) for rows in program.rows]
        self.end = [np.full((len(rows), *each), np.inf) for rows in program.rows]
        self.free: list[Floats] = []

    def begin(self, carry: Floats) -> None:
        """Compute the data wait, which follows the end of the previous step."""
        made = self.durations
        tail = made.optimizer
        if "gather" in self.program.named[0]:
            tail = tail.max(axis=2, keepdims=True) + made.gather
        tail = np.broadcast_to(tail, made.optimizer.shape) + made.checkpoint[:, None, None, None]
        self.tail = tail
        begin = np.concatenate([carry[None], tail[:-1]])
        for stage in range(len(self.program.rows)):
            named = self.program.named[stage]
            self.start[stage][named["data"]] = self.start[stage][named["step"]] = begin[:, stage]
            self.free.append(begin[:, stage] + made.data[:, stage])
            self.end[stage][named["data"]] = self.free[stage]

    def compute(self, move: Move) -> None:
        stage, made = move.stage, self.durations
        begin = self.free[stage]
        self.start[stage][move.row] = begin
        own = begin + made.compute[stage][move.number]
        here = made.gc_place[:, stage] == move.number
        if here.any():
            row = self.program.named[stage]["gc"]
            pause = np.where(here, made.gc[:, stage], 0.0)
            self.start[stage][row] = np.where(here, begin, self.start[stage][row])
            self.end[stage][row] = np.where(here, begin + pause, self.end[stage][row])
            own = own + pause
        if move.nested is not None:
            self.start[stage][move.nested] = own
            own = own.max(axis=-1, keepdims=True) + made.tensor[stage][move.number]
            own = np.broadcast_to(own, begin.shape)
            self.end[stage][move.nested] = own
        self.end[stage][move.row] = self.free[stage] = own

    def receive(self, move: Move) -> None:
        assert move.source is not None
        stage = move.stage
        source, row = move.source
        begin = self.free[stage]
        arrival = np.maximum(begin, self.start[source][row]) + self.durations.transfer[move.number]
        self.start[stage][move.row] = begin
        self.end[stage][move.row] = self.end[source][row] = self.free[stage] = arrival

    def finish(self) -> Timeline:
        made = self.durations
        for stage, named in enumerate(self.program.named):
            self.free[stage] = self.free[stage] + made.after_pipeline[:, stage]
            if "extra" in named:
                self._extra(stage, named["extra"])
            if "reduce" in named:
                self.start[stage][named["reduce"]] = self.free[stage]
                done = self.free[stage].max(axis=1, keepdims=True) + made.reduction[:, stage]
                self.free[stage] = np.broadcast_to(done, self.free[stage].shape)
                self.end[stage][named["reduce"]] = self.free[stage]
        latest = np.max([free.max(axis=(1, 2)) for free in self.free], axis=0)
        exchanged = latest + made.world
        for stage, named in enumerate(self.program.named):
            self._end_of_step(stage, named, exchanged[:, None, None])
        return Timeline(self.start, self.end, exchanged, self.tail[-1])

    def _extra(self, stage: int, row: int) -> None:
        taken = self.durations.extra[:, stage]
        flows = ~np.isnan(taken)
        done = self.free[stage].max(axis=1, keepdims=True) + taken
        self.start[stage][row] = np.where(flows, self.free[stage], np.inf)
        self.free[stage] = np.where(flows, done, self.free[stage])
        self.end[stage][row] = np.where(flows, self.free[stage], np.inf)

    def _end_of_step(self, stage: int, named: dict[str, int], exchanged: Floats) -> None:
        start, end, made = self.start[stage], self.end[stage], self.durations
        start[named["world"]] = self.free[stage]
        end[named["world"]] = exchanged
        start[named["optimizer"]] = exchanged
        after = exchanged + made.optimizer[:, stage]
        end[named["optimizer"]] = after
        finished = exchanged + self.tail[:, stage]
        checkpoint = made.checkpoint[:, None, None]
        if "gather" in named:
            start[named["gather"]] = after
            end[named["gather"]] = finished - checkpoint
        start[named["checkpoint"]] = np.where(checkpoint > 0, finished - checkpoint, np.inf)
        end[named["checkpoint"]] = np.where(checkpoint > 0, finished, np.inf)
        end[named["step"]] = finished
