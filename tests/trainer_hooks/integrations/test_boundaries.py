"""The steps that adapters mark, and the edge that no error of theirs passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import paceline
from paceline import hooks
from paceline.integrations.boundaries import (
    MOST_STEPS_OF_OTHERS,
    Between,
    LeadingOptimizer,
    NotResumedError,
    StepBoundaries,
    follow,
    never_raises,
    surround,
)
from paceline.saves import completed_steps
from paceline.writer.interface import Timed
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack


@pytest.fixture
def boundaries() -> Iterator[StepBoundaries]:
    boundaries = StepBoundaries()
    yield boundaries
    boundaries.release()


def steps(reader: RingReader) -> list[int]:
    return [span.step for span in unpack(reader.read()) if span.op == Op.STEP]


def test_a_step_ends_when_the_next_begins(reader: RingReader, boundaries: StepBoundaries) -> None:
    boundaries.take()
    for step in (7, 8):
        boundaries.begin(step)
        boundaries.begin(step)  # a second callback
        boundaries.complete()
    with paceline.evaluate():
        pass
    boundaries.release()
    spans = list(unpack(reader.read()))
    assert [span.step for span in spans if span.op == Op.STEP] == [7, 8]
    assert [span.step for span in spans if span.op == Op.EVALUATE] == [8]


def test_a_step_that_is_not_complete_is_dropped(
    reader: RingReader, boundaries: StepBoundaries
) -> None:
    boundaries.take()
    boundaries.begin(0)
    boundaries.next()
    boundaries.release()
    assert steps(reader) == [0]


def test_a_job_that_has_saved_never_begins_at_step_0_again(
    reader: RingReader, boundaries: StepBoundaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SAVED_STEP", "940")
    boundaries.take()
    with pytest.raises(NotResumedError, match="checkpoint of step 940, found step 0"):
        never_raises(boundaries.resume)(0)
    boundaries.resume(920)  # the newest one may be damaged
    boundaries.release()
    boundaries.take()
    boundaries.resume(0)  # the script's next training
    assert boundaries.step == 0


@pytest.mark.parametrize("saved", ["", "0"])
def test_a_job_that_has_not_saved_begins_with_step_0(
    reader: RingReader, boundaries: StepBoundaries, monkeypatch: pytest.MonkeyPatch, saved: str
) -> None:
    monkeypatch.setenv("PACELINE_SAVED_STEP", saved)
    boundaries.take()
    boundaries.resume(0)
    boundaries.complete()
    boundaries.release()
    assert steps(reader) == [0]


def test_a_trainer_takes_the_steps_from_its_engine(
    reader: RingReader, boundaries: StepBoundaries
) -> None:
    engine = StepBoundaries()
    assert engine.claim()
    boundaries.take()
    boundaries.begin(3)
    assert not engine.claim()
    engine.begin(100)
    engine.next()
    engine.release()
    boundaries.complete()
    boundaries.release()
    assert steps(reader) == [3]
    assert engine.claim(), "the training is over"
    engine.release()


def test_microbatches_are_numbered_in_each_step(
    reader: RingReader, boundaries: StepBoundaries
) -> None:
    boundaries.take()
    for step in range(2):
        boundaries.begin(step)
        for _ in range(2):
            boundaries.forward()
            boundaries.forward()  # a second callback
            boundaries.backward()
            boundaries.end_microbatch()
            boundaries.end_microbatch()
        boundaries.complete()
    boundaries.release()
    passes = [s for s in unpack(reader.read()) if s.op in (Op.FORWARD, Op.BACKWARD)]
    numbered = [(span.step, span.op, span.microbatch) for span in passes]
    assert numbered == [(step, op, number) for step in (0, 1) for number in (0, 1) for op in (1, 2)]


class Engine:
    """Stands for a class of a framework."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, amount: int, *, twice: bool = False) -> int:
        self.calls.append("step")
        return amount * (1 + twice)


def test_a_surrounded_method_is_called_once_with_its_arguments() -> None:
    class Surrounded(Engine):
        step = Engine.step

    def timed(engine: Engine, *_: object) -> Timed:
        return Between(lambda: engine.calls.append("begin"), lambda: engine.calls.append("end"))

    def after(engine: Engine, *_: object) -> None:
        engine.calls.append("after")

    for _ in range(2):
        surround(Surrounded, "step", timed)
        surround(Surrounded, "other_version", timed)
        follow(Surrounded, "step", after)
    engine = Surrounded()
    assert engine.step(2, twice=True) == 4
    assert engine.calls == ["begin", "step", "end", "after"]
    assert Surrounded.step.__name__ == "step"


def test_named_arguments_are_found_however_they_are_passed() -> None:
    found: list[tuple[object, ...]] = []

    class Engine:
        def save(self, directory: str, tag: str | None = None) -> str:
            return f"{directory}/{tag}"

    def saved(*arguments: object) -> None:
        found.append(arguments[1:])

    follow(Engine, "save", saved, arguments=("tag", "directory"))
    assert Engine().save("a", "b") == "a/b"
    assert Engine().save(tag="b", directory="a") == "a/b"
    Engine().save("a")
    assert found == [("b", "a"), ("b", "a"), (None, "a")]


def test_the_completed_steps_are_those_of_the_framework(
    reader: RingReader, boundaries: StepBoundaries
) -> None:
    assert hooks.completed_steps() is None
    boundaries.take()
    boundaries.begin(7)
    assert hooks.completed_steps() == 7
    boundaries.complete()
    assert hooks.completed_steps() == 8
    boundaries.next()
    assert hooks.completed_steps() == 8


def test_an_error_of_an_adapter_does_not_reach_the_framework() -> None:
    class Surrounded(Engine):
        step = Engine.step

    def fail(*_: object) -> Timed:
        raise AttributeError("another version")

    def fail_later(*_: object) -> Timed:
        return Between(lambda: fail(), lambda: fail())

    surround(Surrounded, "step", fail)
    surround(Surrounded, "step", fail_later)
    follow(Surrounded, "step", fail)
    assert Surrounded().step(3) == 3


class Optimizer:
    """Stands for an optimizer whose parameters have made `count` steps."""

    def __init__(self, count: int | None) -> None:
        self.state = {"weight": {} if count is None else {"step": count}}


def test_steps_are_counted_by_the_optimizers_state() -> None:
    assert completed_steps([]) == 0
    assert completed_steps([Optimizer(None), Optimizer(12)]) == 12


def test_the_first_of_several_optimizers_leads_until_others_are_set_up() -> None:
    leading = LeadingOptimizer()
    first, second = Optimizer(0), Optimizer(0)
    assert [leading.is_it(each) for each in (first, second, first)] == [True, False, True]
    assert [leading.may_be(each) for each in (first, second)] == [True, False]
    leading.reset()
    assert leading.may_be(first)
    assert leading.is_it(second)


def test_an_optimizer_that_is_not_used_any_more_is_replaced() -> None:
    leading = LeadingOptimizer()
    first, second = Optimizer(0), Optimizer(0)
    assert leading.is_it(first)
    for _ in range(3):  # a step of the generator after each 100 of the critic
        assert not any(leading.is_it(second) for _ in range(MOST_STEPS_OF_OTHERS))
        assert leading.is_it(first)
    counted = [leading.is_it(second) for _ in range(MOST_STEPS_OF_OTHERS + 3)]
    assert counted.index(True) == MOST_STEPS_OF_OTHERS
    assert counted.count(True) == 3
    assert leading.may_be(second)
    assert not leading.may_be(first)
