"""Pipeline schedules and their simulation."""

from __future__ import annotations

import pytest

from paceline_server.whatif.schedules import (
    ScheduledAction,
    ScheduleError,
    actions,
    gpipe,
    one_forward_one_backward,
    simulate,
    zero_bubble,
)
from paceline_wire.spans import Op

SIZES = [
    (stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 8, 16, 40)
]


def equal_seconds(_stage: int, _action: ScheduledAction) -> float:
    return 1.0


def whole_backwards(_stage: int, action: ScheduledAction) -> float:
    """Return durations in which a backward takes as long as its two split parts together."""
    return 1.0 if action.op == Op.FORWARD else 2.0


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("seconds_of", [equal_seconds, whole_backwards])
def test_bubble_equals_the_theory(make, stages, microbatches, seconds_of) -> None:  # type: ignore[no-untyped-def]
    simulated = simulate(make(stages, microbatches), seconds_of)
    theory = (stages - 1) / (microbatches + stages - 1)
    assert simulated.idle_ratios == pytest.approx([theory] * stages)
    assert simulated.bubble_ratio == pytest.approx(theory)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_interleaved_bubble_equals_the_theory(stages: int, microbatches: int, chunks: int) -> None:
    simulated = simulate(actions("interleaved", stages, microbatches, chunks), equal_seconds)
    if microbatches % stages == 0:  # the formula holds only for multiples
        theory = (stages - 1) / (chunks * microbatches + stages - 1)
        assert simulated.bubble_ratio == pytest.approx(theory)
    assert sum(simulated.busy_seconds) == 2 * stages * microbatches * chunks


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_zero_bubble_is_idle_a_third_of_1f1b_with_the_same_memory(
    stages: int, microbatches: int
) -> None:
    split = simulate(zero_bubble(stages, microbatches), equal_seconds)
    whole = simulate(one_forward_one_backward(stages, microbatches), whole_backwards)
    assert split.busy_seconds == whole.busy_seconds
    idle, usual = (run.seconds - run.busy_seconds[0] for run in (split, whole))
    assert idle <= usual / 3
    assert max(split.activations) == max(whole.activations)


def test_activations_held_by_gpipe_1f1b_and_interleaved() -> None:
    assert simulate(gpipe(4, 16), equal_seconds).activations == (16,) * 4
    assert simulate(one_forward_one_backward(4, 16), equal_seconds).activations == (4, 3, 2, 1)
    # Interleaved: the first stage holds 2 (p - 1) + (v - 1) p + 1 chunks.
    interleaved = simulate(one_forward_one_backward(4, 16, 2), equal_seconds)
    assert interleaved.activations[0] == 11


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_chunk_runs_every_microbatch_once(name: str, stages: int, microbatches: int) -> None:
    chunks = 2 if name == "interleaved" else 1
    for stage_actions in actions(name, stages, microbatches, chunks):
        ops = {action.op for action in stage_actions}
        assert len(set(stage_actions)) == len(stage_actions) == len(ops) * microbatches * chunks
        assert {Op.FORWARD, Op.BACKWARD} <= ops


def test_transfers_take_time_only_between_stages() -> None:
    one_stage = simulate(gpipe(1, 4), equal_seconds, transfer_seconds=0.5)
    assert one_stage.seconds == 8.0
    two_stages = simulate(gpipe(2, 1), equal_seconds, transfer_seconds=0.5)
    assert two_stages.seconds == 4.0 + 2 * 0.5


def test_slow_stage_makes_other_stages_idle() -> None:
    simulated = simulate(
        one_forward_one_backward(4, 8), lambda stage, _: 1.5 if stage == 2 else 1.0
    )
    assert simulated.idle_ratios[2] == min(simulated.idle_ratios)
    assert simulated.seconds >= 16 * 1.5 + 2 * 2


def test_custom_order_can_be_simulated() -> None:
    """V-shaped placement: the last stage of the first chunk is the first stage of the second."""
    forwards = [ScheduledAction(Op.FORWARD, 0, 0), ScheduledAction(Op.FORWARD, 0, 1)]
    backwards = [ScheduledAction(Op.BACKWARD, 0, 1), ScheduledAction(Op.BACKWARD, 0, 0)]
    simulated = simulate(
        [forwards + backwards] * 2,
        equal_seconds,
        part_of=lambda stage, chunk, stages: stage if chunk == 0 else 2 * stages - 1 - stage,
    )
    assert simulated.seconds == 8.0
    assert simulated.activations == (2, 2)


def test_order_with_a_deadlock_is_rejected() -> None:
    backward_first = [ScheduledAction(Op.BACKWARD, 0), ScheduledAction(Op.FORWARD, 0)]
    with pytest.raises(
        ScheduleError, match="stage 0 waits forever to run backward of microbatch 0"
    ):
        simulate([backward_first], equal_seconds)
    missing = [
        [ScheduledAction(Op.FORWARD, 0)],
        [ScheduledAction(Op.FORWARD, 0), ScheduledAction(Op.FORWARD, 1)],
    ]
    with pytest.raises(ScheduleError, match="stage 1 waits forever"):
        simulate(missing, equal_seconds)


def test_actions_other_than_compute_are_rejected() -> None:
    with pytest.raises(ScheduleError, match="optimizer is not a compute operation"):
        simulate([[ScheduledAction(Op.OPTIMIZER, 0)]], equal_seconds)


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("dualpipe", (2, 2), "unknown schedule 'dualpipe'"),
        ("1f1b", (0, 2), "needs at least 1"),
        ("zero_bubble", (2, 2, 2), "one chunk per stage"),
    ],
)
def test_error_explains_an_unavailable_schedule(
    name: str, sizes: tuple[int, ...], why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        actions(name, *sizes)


def test_empty_schedule_takes_no_time() -> None:
    simulated = simulate([[], []], equal_seconds)
    assert simulated.seconds == 0.0
    assert simulated.bubble_ratio == 0.0
