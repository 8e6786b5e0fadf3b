from __future__ import annotations

from collections import deque

import pytest

from paceline_trainer.schedule import SCHEDULES, ScheduleAction, ScheduleShape, forward_only, plan
from paceline_wire.spans import Op

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 8), (3, 2), (4, 3), (4, 8), (8, 32)]
INTERLEAVED = [(2, 2, 2), (2, 8, 2), (2, 6, 3), (3, 6, 2), (4, 4, 2), (4, 8, 3), (8, 32, 2)]
EVERY = [
    *(("gpipe", ScheduleShape(*shape)) for shape in SHAPES),
    *(("1f1b", ScheduleShape(*shape)) for shape in SHAPES),
    *(("interleaved", ScheduleShape(*shape)) for shape in INTERLEAVED),
]

Sent = tuple[Op, int, int]  # (receiving op, microbatch, receiving chunk)


@pytest.mark.parametrize(("schedule", "shape"), EVERY)
def test_every_stage_does_each_action_once_and_no_schedule_deadlocks(
    schedule: str, shape: ScheduleShape
) -> None:
    todo = [deque(plan(SCHEDULES[schedule], stage, shape)) for stage in range(shape.stages)]
    every = [(m, c) for m in range(shape.microbatches) for c in range(shape.chunks)]
    for actions in todo:
        for op in (Op.FORWARD, Op.BACKWARD):
            assert sorted((m, c) for o, m, c in actions if o == op) == every
    Line(shape).play(todo)


@pytest.mark.parametrize(
    "shape", [ScheduleShape(3, 4), ScheduleShape(2, 4, 2), ScheduleShape(4, 3, 3)]
)
def test_an_evaluation_has_only_forwards(shape: ScheduleShape) -> None:
    todo = [deque(plan(forward_only, stage, shape)) for stage in range(shape.stages)]
    assert not any(op in (Op.BACKWARD, Op.BACKWARD_RECV) for actions in todo for op, *_ in actions)
    Line(shape).play(todo)


class Line:
    """Stages that execute their actions with unbounded sends and in-order receives.

    There is one channel per pair and direction, as the hooks number transfers; it does not
    distinguish activations from gradients.
    """

    def __init__(self, shape: ScheduleShape) -> None:
        self.shape = shape
        self.channels: dict[tuple[int, int], deque[Sent]] = {}
        self.there: list[set[Sent]] = [set() for _ in range(shape.stages)]

    def play(self, todo: list[deque[ScheduleAction]]) -> None:
        while any(todo):
            moved = False
            for stage, actions in enumerate(todo):
                while actions and self._carry_out(stage, actions[0]):
                    actions.popleft()
                    moved = True
            assert moved, f"stuck at {[str(actions[0]) for actions in todo if actions]}"
        assert not any(self.channels.values()), "something was sent that nobody received"

    def _carry_out(self, stage: int, action: ScheduleAction) -> bool:
        """Execute the action; return False if it has to wait."""
        op, microbatch, chunk = action
        part = chunk * self.shape.stages + stage
        there, last = self.there[stage], self.shape.stages * self.shape.chunks - 1
        match op:
            case Op.FORWARD_SEND:
                self._send(stage, part + 1, Op.FORWARD_RECV, microbatch)
            case Op.BACKWARD_SEND:
                self._send(stage, part - 1, Op.BACKWARD_RECV, microbatch)
            case Op.FORWARD_RECV | Op.BACKWARD_RECV:
                source = part - 1 if op == Op.FORWARD_RECV else part + 1
                channel = self.channels.get((source % self.shape.stages, stage))
                if not channel:
                    return False
                assert channel.popleft() == action, f"{action} would receive another"
                there.add(tuple(action))
            case Op.FORWARD:
                assert part == 0 or (Op.FORWARD_RECV, microbatch, chunk) in there, action
            case Op.BACKWARD:
                assert part == last or (Op.BACKWARD_RECV, microbatch, chunk) in there, action
        return True

    def _send(self, stage: int, part: int, op: Op, microbatch: int) -> None:
        chunk, receiver = divmod(part, self.shape.stages)
        self.channels.setdefault((stage, receiver), deque()).append((op, microbatch, chunk))


def test_1f1b_holds_at_most_as_many_microbatches_as_stages_remain() -> None:
    for stage in range(4):
        assert _most_held(SCHEDULES["1f1b"](stage, ScheduleShape(4, 16))) == 4 - stage


def test_interleaved_holds_as_many_microbatches_as_in_its_paper() -> None:
    """The first stage holds chunks * stages + stages - 1 (arXiv:2104.04473, section 2.2)."""
    assert _most_held(SCHEDULES["interleaved"](0, ScheduleShape(4, 16, 2))) == 2 * 4 + 4 - 1


def _most_held(actions: object) -> int:
    held = most = 0
    for op, *_ in actions:  # type: ignore[attr-defined]
        held += 1 if op == Op.FORWARD else -1
        most = max(most, held)
    return most


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize(("schedule", "shape"), EVERY)
def test_equal_stages_idle_as_long_as_in_theory(
    schedule: str, shape: ScheduleShape, forward: float, backward: float
) -> None:
    """They idle for (p - 1) / (v m + p - 1) of the time from the first action to the last."""
    seconds = {Op.FORWARD: forward, Op.BACKWARD: backward}
    stages, microbatches, chunks = shape
    plans = [list(SCHEDULES[schedule](stage, shape)) for stage in range(stages)]
    done: dict[tuple[Op, int, int], float] = {}  # (op, part, microbatch)
    clocks = [0.0] * stages
    while any(plans):
        for stage, actions in enumerate(plans):
            while actions:
                op, microbatch, chunk = actions[0]
                part = chunk * stages + stage
                before = _before(op, part, stages * chunks)
                if before is not None and (*before, microbatch) not in done:
                    break
                ready = 0.0 if before is None else done[(*before, microbatch)]
                clocks[stage] = max(clocks[stage], ready) + seconds[op]
                done[op, part, microbatch] = clocks[stage]
                del actions[0]
    work = microbatches * chunks * (forward + backward)
    theory = (stages - 1) / (chunks * microbatches + stages - 1)
    assert 1 - work / max(clocks) == pytest.approx(theory)


def _before(op: Op, part: int, parts: int) -> tuple[Op, int] | None:
    if op == Op.FORWARD:
        return (Op.FORWARD, part - 1) if part else None
    return (Op.BACKWARD, part + 1) if part < parts - 1 else (Op.FORWARD, part)


def test_actions_print_in_the_usual_notation() -> None:
    actions = plan(SCHEDULES["1f1b"], 0, ScheduleShape(2, 2))
    assert " ".join(map(str, actions)) == "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1"
    assert str(ScheduleAction(Op.BACKWARD, 3, 1)) == "B3.1"
