"""The operations of one step, per pipeline stage, and an order in which they can be computed.

The actions come from the reference trainer's schedules. All ranks of a stage do the same, so there
is one program per stage. Its rows are the spans that each rank records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline_evaluation.shape import JobShape
from paceline_trainer import schedule
from paceline_trainer.schedule import ScheduleAction
from paceline_wire.spans import RECEIVE_OPS, Op

TENSOR, DATA, WORLD, EXTRA = 1, 2, 3, 4  # process group ids, as the ranks number them


@dataclass(slots=True)
class ProgramSpan:
    """One span of a step, without rank and times."""

    op: Op
    action: ScheduleAction | None = None  # None: not a pipeline action
    group: int = 0
    peer_stage: int | None = None
    is_async: bool = False
    sequence: int = 0  # within the step, from 1


@dataclass(frozen=True, slots=True)
class Move:
    """One action and its row in the program of its stage."""

    stage: int
    action: ScheduleAction
    row: int
    # computes: position in the stage; receives: position among all transfers
    number: int = 0
    nested: int | None = None  # row of the tensor-parallel collective inside
    source: tuple[int, int] | None = None  # receives only: (stage, row) of the send


@dataclass(slots=True)
class StepProgram:
    """The spans of one step, and the actions in an order that respects their dependencies."""

    rows: list[list[ProgramSpan]]  # by stage, in the order of recording
    moves: list[Move]
    computes: list[list[ScheduleAction]]  # by stage, in order
    transfers: int
    named: list[dict[str, int]] = field(default_factory=list)  # by stage: rows outside the pipeline
    counts: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # transfers from one stage to another


def build(shape: JobShape, *, extra: bool = False) -> StepProgram:
    """Return the program of a job; with `extra`, there is a row for a second reduction (dp)."""
    topology = shape.topology
    made_for = schedule.ScheduleShape(topology.pp, shape.microbatches, shape.virtual)
    order = schedule.SCHEDULES[shape.schedule]
    actions = [schedule.plan(order, stage, made_for) for stage in range(topology.pp)]
    return _Builder(shape, actions, extra).build()


class _Builder:
    def __init__(
        self, shape: JobShape, actions: Sequence[Sequence[ScheduleAction]], extra: bool
    ) -> None:
        self.shape, self.extra = shape, extra
        self.pp = shape.topology.pp
        self.actions = actions
        self.program = StepProgram([[] for _ in actions], [], [[] for _ in actions], 0)
        self.sent: dict[tuple[int, Op, int], tuple[int, int]] = {}

    def build(self) -> StepProgram:
        self._prologue()
        position = [0] * self.pp
        while any(position[stage] < len(self.actions[stage]) for stage in range(self.pp)):
            before = list(position)
            for stage in range(self.pp):
                while position[stage] < len(self.actions[stage]):
                    if not self._add(stage, self.actions[stage][position[stage]]):
                        break
                    position[stage] += 1
            if position == before:
                raise ValueError(f"schedule {self.shape.schedule} has a circular dependency")
        self._epilogue()
        return self.program

    def _prologue(self) -> None:
        for rows in self.program.rows:
            rows.append(ProgramSpan(Op.DATA_WAIT))
            rows.append(ProgramSpan(Op.GC))
            self.program.named.append({"data": 0, "gc": 1})

    def _add(self, stage: int, action: ScheduleAction) -> bool:
        """Add an action. Return False if it depends on one that has not been added yet."""
        if action.op in RECEIVE_OPS:
            return self._receive(stage, action)
        if action.op in (Op.FORWARD_SEND, Op.BACKWARD_SEND):
            self._send(stage, action)
        else:
            self._compute(stage, action)
        return True

    def _part(self, stage: int, action: ScheduleAction) -> int:
        return action.chunk * self.pp + stage

    def _send(self, stage: int, action: ScheduleAction) -> None:
        step = 1 if action.op == Op.FORWARD_SEND else -1
        part = self._part(stage, action) + step
        rows = self.program.rows[stage]
        peer = part % self.pp
        self.sent[part, action.op, action.microbatch] = (stage, len(rows))
        self.program.moves.append(Move(stage, action, len(rows)))
        # One sequence per pair of stages and direction: with pp = 2 it counts both kinds of sends.
        counts = self.program.counts
        counts[stage, peer] = sequence = counts.get((stage, peer), 0) + 1
        rows.append(
            ProgramSpan(action.op, action, peer_stage=peer, is_async=True, sequence=sequence)
        )

    def _receive(self, stage: int, action: ScheduleAction) -> bool:
        send = Op.FORWARD_SEND if action.op == Op.FORWARD_RECV else Op.BACKWARD_SEND
        source = self.sent.get((self._part(stage, action), send, action.microbatch))
        if source is None:
            return False
        rows = self.program.rows[stage]
        sequence = self.program.rows[source[0]][source[1]].sequence
        number = self.program.transfers
        self.program.transfers += 1
        self.program.moves.append(Move(stage, action, len(rows), number, source=source))
        rows.append(ProgramSpan(action.op, action, peer_stage=source[0], sequence=sequence))
        return True

    def _compute(self, stage: int, action: ScheduleAction) -> None:
        rows = self.program.rows[stage]
        computes = self.program.computes[stage]
        nested = None
        if self.shape.topology.tp > 1:
            nested = len(rows)
            rows.append(ProgramSpan(Op.ALL_REDUCE, action, TENSOR, sequence=len(computes) + 1))
        self.program.moves.append(Move(stage, action, len(rows), len(computes), nested))
        computes.append(action)
        rows.append(ProgramSpan(action.op, action))

    def _epilogue(self) -> None:
        """Add the end of the step: reduction, exchange, optimizer, ZeRO gather, checkpoint."""
        zero = self.shape.zero
        for stage, rows in enumerate(self.program.rows):
            named = self.program.named[stage]
            if self.extra:
                named["extra"] = len(rows)
                rows.append(ProgramSpan(Op.ALL_REDUCE, group=EXTRA, sequence=1))
            if self.shape.topology.dp > 1:
                named["reduce"] = len(rows)
                rows.append(
                    ProgramSpan(
                        Op.REDUCE_SCATTER if zero else Op.ALL_REDUCE, group=DATA, sequence=1
                    )
                )
            named["world"] = len(rows)
            rows.append(ProgramSpan(Op.ALL_GATHER, group=WORLD, sequence=1))
            named["optimizer"] = len(rows)
            rows.append(ProgramSpan(Op.OPTIMIZER))
            if zero:
                named["gather"] = len(rows)
                rows.append(ProgramSpan(Op.ALL_GATHER, group=DATA, sequence=2))
            named["checkpoint"] = len(rows)
            rows.append(ProgramSpan(Op.CHECKPOINT))
            named["step"] = len(rows)
            rows.append(ProgramSpan(Op.STEP))
