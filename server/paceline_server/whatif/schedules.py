"""Pipeline schedules as data, and what a step takes that follows one.

A schedule is a list of actions per stage, in the order in which the stage carries them out. Nothing
else decides anything: `simulate` runs lists from the functions below, from a recording, or made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline_wire.spans import Op


class ScheduledAction(NamedTuple):
    """A computation: FORWARD, BACKWARD, or BACKWARD_WEIGHT where a schedule splits backwards (then
    BACKWARD is the part that the stage before waits for)."""

    op: Op
    microbatch: int
    chunk: int = 0


Actions = Sequence[Sequence[ScheduledAction]]  # [stage][position]


class ScheduleError(ValueError):
    """No such schedule, or one that cannot be carried out."""


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    forwards = [ScheduledAction(Op.FORWARD, *unit) for unit in _units(stages, microbatches, chunks)]
    backwards = [
        ScheduledAction(Op.BACKWARD, microbatch, chunks - 1 - chunk)
        for microbatch, chunk in _units(stages, microbatches, chunks)
    ]
    return [forwards + backwards for _ in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """Fill the pipeline, then alternate; with several chunks a stage, interleaved.

    Sources: PipeDream-Flush, arXiv:2006.09503, section 3; Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters", SC 2021, section 2.2.
    """
    return [list(_alternating(stage, stages, microbatches, chunks)) for stage in range(stages)]


def _alternating(
    stage: int, stages: int, microbatches: int, chunks: int
) -> Iterator[ScheduledAction]:
    units = _units(stages, microbatches, chunks)
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(units))
    for unit in units[:ahead]:
        yield ScheduledAction(Op.FORWARD, *unit)
    for position, (microbatch, chunk) in enumerate(units):
        if position + ahead < len(units):
            yield ScheduledAction(Op.FORWARD, *units[position + ahead])
        yield ScheduledAction(Op.BACKWARD, microbatch, chunks - 1 - chunk)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """ZB-H1: as 1F1B, with the weights' gradients put off to where a stage would be idle.

    Later stages put off more of them, so that each holds as much as the first stage does in 1F1B.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.1.
    """
    if chunks != 1:
        raise ScheduleError(f"zero-bubble has one chunk per stage, not {chunks}")
    return [list(_putting_off(stage, stages, microbatches)) for stage in range(stages)]


def _putting_off(stage: int, stages: int, microbatches: int) -> Iterator[ScheduledAction]:
    weights = 0
    for action in _alternating(stage, stages, microbatches, 1):
        yield action
        if action.op == Op.BACKWARD and action.microbatch - weights >= stage:
            yield ScheduledAction(Op.BACKWARD_WEIGHT, weights)
            weights += 1
    for microbatch in range(weights, microbatches):
        yield ScheduledAction(Op.BACKWARD_WEIGHT, microbatch)


def _units(stages: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of forwards: `stages` microbatches through each chunk."""
    if chunks == 1:
        return [(microbatch, 0) for microbatch in range(microbatches)]
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]


SCHEDULES: Mapping[str, Callable[[int, int, int], Actions]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": one_forward_one_backward,
    "interleaved_1f1b": one_forward_one_backward,
    "zero_bubble": zero_bubble,
    "zb-h1": zero_bubble,
}


def actions(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """Raises ScheduleError for a schedule that is not known, or sizes it cannot have."""
    make = SCHEDULES.get(schedule.lower())
    if make is None:
        known = ", ".join(SCHEDULES)
        raise ScheduleError(f"schedule {schedule!r} is not known: expected one of {known}")
    if min(stages, microbatches, chunks) < 1:
        raise ScheduleError(
            f"{schedule} needs 1 or more of each, got {stages} stages, {microbatches} "
            f"microbatches, {chunks} chunks"
        )
    return make(stages, microbatches, chunks)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One step of a pipeline, without what comes before and after it."""

    seconds: float
    busy_seconds: tuple[float, ...]  # by stage
    activations: tuple[int, ...]  # by stage: most (microbatch, chunk) held at once

    @property
    def idle_ratios(self) -> tuple[float, ...]:
        """By stage: its bubble."""
        if not self.seconds:
            return tuple(0.0 for _ in self.busy_seconds)
        return tuple(1.0 - busy / self.seconds for busy in self.busy_seconds)

    @property
    def bubble_ratio(self) -> float:
        """The mean over the stages."""
        return sum(self.idle_ratios) / len(self.busy_seconds)


def usual_part(stage: int, chunk: int, stages: int) -> int:
    """Which part of the model a stage's chunk is: they go around the stages."""
    return chunk * stages + stage


def simulate(
    actions: Actions,
    seconds_of: Callable[[int, ScheduledAction], float],
    transfer_seconds: float = 0.0,
    part_of: Callable[[int, int, int], int] = usual_part,
) -> Simulated:
    """Carry the actions out as soon as the one before and what they need are done.

    Args:
        seconds_of: (stage, action) -> how long it computes.
        transfer_seconds: from a stage to another; sending and receiving keep nobody busy.
        part_of: (stage, chunk, stages) -> part of the model.
    Raises:
        ScheduleError: stages would wait for each other for ever.
    """
    run = _Run(actions, seconds_of, transfer_seconds, part_of)
    run.carry_out()
    return Simulated(
        max(run.free, default=0.0),
        tuple(run.busy),
        tuple(_activations(stage_actions) for stage_actions in actions),
    )


class _Run:
    def __init__(
        self,
        actions: Actions,
        seconds_of: Callable[[int, ScheduledAction], float],
        transfer_seconds: float,
        part_of: Callable[[int, int, int], int],
    ) -> None:
        self.actions = actions
        self.seconds_of = seconds_of
        self.transfer_seconds = transfer_seconds
        stages = len(actions)
        chunks = {action.chunk for mine in actions for action in mine}
        self.parts = {
            (stage, chunk): part_of(stage, chunk, stages)
            for stage in range(stages)
            for chunk in chunks
        }
        self.stage_of = {part: stage for (stage, _), part in self.parts.items()}
        self.last_part = max(self.parts.values(), default=0)
        self.free = [0.0] * stages
        self.busy = [0.0] * stages
        self.done: dict[tuple[int, int, int], float] = {}  # (op, part, microbatch) -> end
        self.position = [0] * stages

    def carry_out(self) -> None:
        waiting: dict[tuple[int, int, int], int] = {}  # what a stage waits for -> the stage
        ready = list(range(len(self.actions)))
        while ready:
            stage = ready.pop()
            mine = self.actions[stage]
            while self.position[stage] < len(mine):
                action = mine[self.position[stage]]
                part = self.parts[stage, action.chunk]
                missing = self._start(stage, action, part)
                if missing is not None:
                    waiting[missing] = stage
                    break
                done = (action.op, part, action.microbatch)
                self.done[done] = self.free[stage]
                self.position[stage] += 1
                if done in waiting:
                    ready.append(waiting.pop(done))
        if waiting:
            stage = min(waiting.values())
            stuck = self.actions[stage][self.position[stage]]
            raise ScheduleError(
                f"stage {stage} waits for ever to do {stuck.op.name.lower()} of microbatch "
                f"{stuck.microbatch}, chunk {stuck.chunk}"
            )

    def _start(self, stage: int, action: ScheduledAction, part: int) -> tuple[int, int, int] | None:
        """Carry it out, or say what it waits for."""
        op, microbatch, _ = action
        start = self.free[stage]
        for needed, where in self._needs(op, part):
            end = self.done.get((needed, where, microbatch))
            if end is None:
                return needed, where, microbatch
            if self.stage_of[where] != stage:
                end += self.transfer_seconds
            start = max(start, end)
        seconds = self.seconds_of(stage, action)
        self.free[stage] = start + seconds
        self.busy[stage] += seconds
        return None

    def _needs(self, op: Op, part: int) -> tuple[tuple[Op, int], ...]:
        if op == Op.FORWARD:
            return ((Op.FORWARD, part - 1),) if part else ()
        if op == Op.BACKWARD:
            own = (Op.FORWARD, part)
            return (own,) if part == self.last_part else (own, (Op.BACKWARD, part + 1))
        if op == Op.BACKWARD_WEIGHT:
            return ((Op.BACKWARD, part),)
        raise ScheduleError(f"{op.name.lower()} is no computation")


def _activations(actions: Sequence[ScheduledAction]) -> int:
    """An activation is held from its forward to the last use that the backward makes of it."""
    split = any(action.op == Op.BACKWARD_WEIGHT for action in actions)
    last_use = Op.BACKWARD_WEIGHT if split else Op.BACKWARD
    held = most = 0
    for action in actions:
        held += (action.op == Op.FORWARD) - (action.op == last_use)
        most = max(most, held)
    return most
