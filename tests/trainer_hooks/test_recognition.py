"""Steps and phases of trainings that call nothing but `paceline.init`: see `recognized_runs.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, Span, unpack
from tests.trainer_hooks.conftest import run_scenarios

STEPS, ACCUMULATED = 6, 4  # as in recognized_runs.py

Recorded = Callable[[str], list[Span]]


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rings")
    run_scenarios("recognized_runs.py", directory)
    return directory


@pytest.fixture
def recorded(rings: Path) -> Recorded:
    """Return the spans of a scenario."""

    def spans(scenario: str) -> list[Span]:
        found = unpack(RingReader(rings / f"{scenario}.g0.r0.ring").read())
        return [span for span in found if span.op not in (Op.GC, Op.STARTUP, Op.MEMORY)]

    return spans


def of(spans: list[Span], op: Op) -> list[Span]:
    return [span for span in spans if span.op == op]


def test_each_loop_has_the_steps_that_it_trained(rings: Path, recorded: Recorded) -> None:
    names = [ring.name.split(".")[0] for ring in rings.glob("*.ring")]
    found = {name: [span.step for span in of(recorded(name), Op.STEP)] for name in names}
    assert len(found) > 20
    assert found == {name: list(range(STEPS)) for name in names}


@pytest.mark.campaign
def test_a_compiled_optimizer_has_the_steps_that_it_trained(
    tmp_path: Path,
) -> None:
    run_scenarios("recognized_runs.py", tmp_path, "compiled_optimizer")
    spans = unpack(RingReader(tmp_path / "compiled_optimizer.g0.r0.ring").read())
    assert [span.step for span in spans if span.op == Op.STEP] == list(range(STEPS))


def test_a_loop_in_which_an_optimizer_repeats_is_one_step(tmp_path: Path) -> None:
    run_scenarios("recognized_runs.py", tmp_path, "critic_twice")
    spans = list(unpack(RingReader(tmp_path / "critic_twice.g0.r0.ring").read()))
    steps = [span.step for span in of(spans, Op.STEP)]
    for op in (Op.BACKWARD, Op.OPTIMIZER):
        counted = Counter(span.step for span in of(spans, op))
        assert [counted[step] for step in steps[-STEPS:]] == [3] * STEPS


def test_an_optimizer_that_steps_now_and_then_leaves_the_steps_of_the_others_whole(
    tmp_path: Path,
) -> None:
    """Each step has the backward pass of its own optimizers."""
    run_scenarios("recognized_runs.py", tmp_path, "actor_now_and_then")
    spans = list(unpack(RingReader(tmp_path / "actor_now_and_then.g0.r0.ring").read()))
    steps = [span.step for span in of(spans, Op.STEP)]
    passes, optimizers = (
        Counter(span.step for span in of(spans, op)) for op in (Op.BACKWARD, Op.OPTIMIZER)
    )
    counted = [(passes[step], optimizers[step]) for step in steps]
    assert counted[10:40] == [(2, 4), *4 * [(1, 3)]] * 6


def test_a_step_is_data_forward_backward_and_optimizer_without_gaps(recorded: Recorded) -> None:
    spans = recorded("plain")
    steps = of(spans, Op.STEP)
    for before, step in pairwise(steps):
        inside = [span for span in spans if span.step == step.step and span.op != Op.STEP]
        assert [span.op for span in inside] == [
            Op.DATA_WAIT,
            Op.FORWARD,
            Op.BACKWARD,
            Op.OPTIMIZER,
        ]
        assert before.end_ns <= step.start_ns == inside[0].start_ns
        for first, second in pairwise(inside):
            assert step.start_ns <= first.start_ns <= first.end_ns <= second.start_ns
        assert inside[-1].end_ns <= step.end_ns
        assert inside[1].end_ns <= inside[2].start_ns
        assert all(span.chunk is None and span.microbatch is None for span in inside)


@pytest.mark.parametrize(
    "name", ["accumulation", "accumulation_in_steps", "prefetched_accumulation"]
)
def test_batches_between_optimizer_steps_are_microbatches(recorded: Recorded, name: str) -> None:
    spans = recorded(name)
    assert Counter(span.step for span in of(spans, Op.BACKWARD)) == dict.fromkeys(
        range(STEPS), ACCUMULATED
    )
    waits = Counter(span.step for span in of(spans, Op.DATA_WAIT))
    assert all(waits[step] == ACCUMULATED for step in range(1, STEPS))


@pytest.mark.parametrize(
    "name",
    [
        "updated_by_hand_after_accumulation",
        "accumulated_without_loader",
        "unhooked_optimizer_in_steps",
        "unhooked_without_loader",
    ],
)
def test_an_update_by_hand_ends_a_step_of_several_microbatches(
    recorded: Recorded, name: str
) -> None:
    backwards = Counter(span.step for span in of(recorded(name), Op.BACKWARD))
    assert backwards == dict.fromkeys(range(STEPS), ACCUMULATED)


@pytest.mark.parametrize("name", ["updated_by_hand", "own_optimizer", "gradients_as_values"])
def test_a_step_without_an_optimizer_is_data_forward_and_backward(
    recorded: Recorded, name: str
) -> None:
    spans = recorded(name)
    for step in range(1, STEPS):
        inside = [span.op for span in spans if span.step == step and span.op != Op.STEP]
        assert inside == [Op.DATA_WAIT, Op.FORWARD, Op.BACKWARD]


def test_gradients_in_a_forward_pass_are_no_backward_passes(recorded: Recorded) -> None:
    backwards = Counter(span.step for span in of(recorded("penalty_of_gradients"), Op.BACKWARD))
    assert [backwards[step] for step in range(1, STEPS)] == [1] * (STEPS - 1)


@pytest.mark.parametrize("name", ["without_loader", "one_batch_for_all", "several_calls_per_step"])
def test_each_step_without_a_loader_has_its_own_backward(recorded: Recorded, name: str) -> None:
    backwards = Counter(span.step for span in of(recorded(name), Op.BACKWARD))
    assert backwards == dict.fromkeys(range(STEPS), 1)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("evaluation_with_gradients_off", 2),
        ("evaluation_by_its_loader", 2),
        ("evaluation_without_loader", 1),
        ("evaluation_of_training_data", 2),
        ("evaluation_of_training_data_in_a_block", 2),
        ("evaluation_of_training_data_by_batch", 2),
        ("evaluation_of_training_data_in_training_mode", 2),
        ("evaluation_without_return", 2),
    ],
)
def test_an_evaluation_is_recorded_and_is_no_step(
    recorded: Recorded, name: str, count: int
) -> None:
    spans = recorded(name)
    evaluations = of(spans, Op.EVALUATE)
    assert evaluations[0].step == 3
    assert len(evaluations) <= count
    training = [*of(spans, Op.FORWARD), *of(spans, Op.BACKWARD)]
    for evaluation in evaluations:
        for span in training:
            assert span.end_ns <= evaluation.start_ns or span.start_ns >= evaluation.end_ns


def test_an_evaluation_that_the_script_marks_is_recorded_once(recorded: Recorded) -> None:
    evaluations = of(recorded("marked_evaluation_of_training_data"), Op.EVALUATE)
    assert len(evaluations) == 2
    assert evaluations[0].end_ns <= evaluations[1].start_ns


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "frozen_teacher",
        "two_loaders",
        "several_epochs",
        "trained_in_evaluation_mode",
        "read_without_gradients",
    ],
)
def test_a_training_without_an_evaluation_has_none(recorded: Recorded, name: str) -> None:
    assert not of(recorded(name), Op.EVALUATE)


def test_saving_is_a_checkpoint(recorded: Recorded) -> None:
    assert {span.step for span in of(recorded("saving"), Op.CHECKPOINT)} == {2, 4}


def test_a_closure_is_timed_inside_its_optimizer_step(recorded: Recorded) -> None:
    spans = recorded("closures")
    optimizer = of(spans, Op.OPTIMIZER)[-1]
    inside = [
        span
        for span in spans
        if span.op in (Op.FORWARD, Op.BACKWARD) and span.step == optimizer.step
    ]
    assert inside
    assert all(optimizer.start_ns <= span.start_ns for span in inside)
    assert all(span.end_ns <= optimizer.end_ns for span in inside)


def test_what_the_script_marks_is_not_recorded_twice(recorded: Recorded) -> None:
    counts = Counter(span.op for span in recorded("own_calls"))
    assert counts[Op.FORWARD] == counts[Op.BACKWARD] == counts[Op.OPTIMIZER] == STEPS
    assert all(span.microbatch == 0 for span in of(recorded("own_calls"), Op.BACKWARD))


@pytest.mark.parametrize(
    ("name", "described"),
    [
        (
            "accumulation",
            "from optimizer steps, 4 microbatches each, data waits of the DataLoader, "
            "forward and backward from autograd",
        ),
        (
            "own_optimizer_in_steps",
            "iterations of paceline.steps, forward and backward from autograd",
        ),
        (
            "updated_by_hand_after_accumulation",
            "from updates of the parameters, 4 microbatches each, data waits of the DataLoader, "
            "forward and backward from autograd",
        ),
        (
            "accumulated_without_loader",
            "from updates of the parameters, 4 microbatches each, "
            "forward and backward from autograd",
        ),
        ("own_calls", "marked by the script, data waits of the DataLoader"),
    ],
)
def test_the_job_shows_what_was_recognized(rings: Path, name: str, described: str) -> None:
    descriptions = RingReader(rings / f"{name}.g0.r0.ring").new_descriptions()
    texts = [each.metadata["steps"] for each in descriptions if "steps" in each.metadata]
    assert texts == [described]
