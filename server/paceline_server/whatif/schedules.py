"""Pipeline schedules as data, and the simulation of a step that follows a schedule.

A schedule is one list of actions per stage, in execution order. `simulate` runs any such lists:
those of the functions below, recorded ones, or handwritten ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline_wire.spans import Op


class ScheduledAction(NamedTuple):
    """A compute action: FORWARD, BACKWARD or BACKWARD_WEIGHT.

    Schedules that split the backward pass compute the input gradients, which the previous stage
    waits for, in BACKWARD and the weight gradients in BACKWARD_WEIGHT.
    """

    op: Op
    microbatch: int
    chunk: int = 0


Actions = Sequence[Sequence[ScheduledAction]]  # [stage][position]


class ScheduleError(ValueError):
    """The schedule is unknown, has invalid sizes, or cannot be executed."""


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """Return GPipe: all forwards, then all backwards (arXiv:1811.06965)."""
    forwards = [ScheduledAction(Op.FORWARD, *unit) for unit in _units(stages, microbatches, chunks)]
    backwards = [
        ScheduledAction(Op.BACKWARD, microbatch, chunks - 1 - chunk)
        for microbatch, chunk in _units(stages, microbatches, chunks)
    ]
    return [forwards + backwards for _ in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int, chunks: int = 1) -> Actions:
    """Return 1F1B: fill the pipeline, then alternate; interleaved if a stage has several chunks.

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
    """Return ZB-H1: 1F1B with weight gradients delayed to times when the stage would be idle.

    Later stages delay more of them. The memory of each stage is that of the first stage in 1F1B.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.1.
    """
    if chunks != 1:
        raise ScheduleError(f"zero-bubble has one chunk per stage, not {chunks}")
    return [list(_delayed_weights(stage, stages, microbatches)) for stage in range(stages)]


def _delayed_weights(stage: int, stages: int, microbatches: int) -> Iterator[ScheduledAction]:
    weights_done = 0
    for action in _alternating(stage, stages, microbatches, 1):
        yield action
        if action.op == Op.BACKWARD and action.microbatch - weights_done >= stage:
            yield ScheduledAction(Op.BACKWARD_WEIGHT, weights_done)
            weights_done += 1
    for microbatch in range(weights_done, microbatches):
        yield ScheduledAction(Op.BACKWARD_WEIGHT, microbatch)


def _units(stages: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) pairs in forward order: groups of `stages` microbatches per
    chunk."""
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
    """Return the actions of a named schedule.

    Args:
        schedule: a key of `SCHEDULES`, in any case.
        chunks: model chunks per stage.
    Raises:
        ScheduleError: the schedule is unknown or does not support these sizes.
    """
    make = SCHEDULES.get(schedule.lower())
    if make is None:
        known = ", ".join(SCHEDULES)
        raise ScheduleError(f"unknown schedule {schedule!r}, expected one of {known}")
    if min(stages, microbatches, chunks) < 1:
        raise ScheduleError(
            f"{schedule} needs at least 1 stage, microbatch and chunk, got {stages} stages, "
            f"{microbatches} microbatches, {chunks} chunks"
        )
    return make(stages, microbatches, chunks)


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulated pipeline part of a step: without data wait, reduction and optimizer."""

    seconds: float
    busy_seconds: tuple[float, ...]  # by stage
    # by stage: largest number of (microbatch, chunk) activations held at a time
    activations: tuple[int, ...]

    @property
    def idle_ratios(self) -> tuple[float, ...]:
        """The share of time in which each stage is idle (its bubble)."""
        if not self.seconds:
            return tuple(0.0 for _ in self.busy_seconds)
        return tuple(1.0 - busy / self.seconds for busy in self.busy_seconds)

    @property
    def bubble_ratio(self) -> float:
        """The mean of `idle_ratios`."""
        return sum(self.idle_ratios) / len(self.busy_seconds)


def usual_part(stage: int, chunk: int, stages: int) -> int:
    """Return the index of the model part of a chunk, if parts go round-robin over the stages."""
    return chunk * stages + stage


def simulate(
    actions: Actions,
    seconds_of: Callable[[int, ScheduledAction], float],
    transfer_seconds: float = 0.0,
    part_of: Callable[[int, int, int], int] = usual_part,
) -> Simulated:
    """Simulate a step in which each action starts as soon as possible.

    An action starts when the previous action of its stage has ended and its inputs have arrived.

    Args:
        seconds_of: returns the compute time of (stage, action).
        transfer_seconds: delay from one stage to another; transfers do not occupy a stage.
        part_of: returns the index of the model part of (stage, chunk, stages).
    Raises:
        ScheduleError: the stages wait for each other forever.
    """
    run = _Simulation(actions, seconds_of, transfer_seconds, part_of)
    run.execute()
    return Simulated(
        max(run.free, default=0.0),
        tuple(run.busy),
        tuple(_activations(stage_actions) for stage_actions in actions),
    )


class _Simulation:
    """The state of a simulated step: when each stage is free and which actions have ended."""

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
        chunks = {action.chunk for stage_actions in actions for action in stage_actions}
        self.parts = {
            (stage, chunk): part_of(stage, chunk, stages)
            for stage in range(stages)
            for chunk in chunks
        }
        self.stage_of = {part: stage for (stage, _), part in self.parts.items()}
        self.last_part = max(self.parts.values(), default=0)
        self.free = [0.0] * stages
        self.busy = [0.0] * stages
        self.done: dict[tuple[int, int, int], float] = {}  # by (op, part, microbatch): its end
        self.position = [0] * stages

    def execute(self) -> None:
        # by awaited (op, part, microbatch): the waiting stage
        waiting: dict[tuple[int, int, int], int] = {}
        ready = list(range(len(self.actions)))
        while ready:
            stage = ready.pop()
            stage_actions = self.actions[stage]
            while self.position[stage] < len(stage_actions):
                action = stage_actions[self.position[stage]]
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
                f"stage {stage} waits forever to run {stuck.op.name.lower()} of microbatch "
                f"{stuck.microbatch}, chunk {stuck.chunk}"
            )

    def _start(self, stage: int, action: ScheduledAction, part: int) -> tuple[int, int, int] | None:
        """Run the action, or return the (op, part, microbatch) that it waits for."""
        op, microbatch, _ = action
        start = self.free[stage]
        for needed_op, needed_part in self._inputs(op, part):
            end = self.done.get((needed_op, needed_part, microbatch))
            if end is None:
                return needed_op, needed_part, microbatch
            if self.stage_of[needed_part] != stage:
                end += self.transfer_seconds
            start = max(start, end)
        seconds = self.seconds_of(stage, action)
        self.free[stage] = start + seconds
        self.busy[stage] += seconds
        return None

    def _inputs(self, op: Op, part: int) -> tuple[tuple[Op, int], ...]:
        if op == Op.FORWARD:
            return ((Op.FORWARD, part - 1),) if part else ()
        if op == Op.BACKWARD:
            own = (Op.FORWARD, part)
            return (own,) if part == self.last_part else (own, (Op.BACKWARD, part + 1))
        if op == Op.BACKWARD_WEIGHT:
            return ((Op.BACKWARD, part),)
        raise ScheduleError(f"{op.name.lower()} is not a compute operation")


def _activations(actions: Sequence[ScheduledAction]) -> int:
    """Return the largest number of activations that a stage holds at a time.

    An activation is held from its forward action until the last backward action that uses it.
    """
    split = any(action.op == Op.BACKWARD_WEIGHT for action in actions)
    last_use = Op.BACKWARD_WEIGHT if split else Op.BACKWARD
    held = most = 0
    for action in actions:
        held += (action.op == Op.FORWARD) - (action.op == last_use)
        most = max(most, held)
    return most
