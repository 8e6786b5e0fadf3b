"""`paceline.step`, `step_begin`, `step_end` and `data_wait`: steps that a script marks itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import paceline
from paceline import hooks
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack


def recorded(reader: RingReader) -> list[tuple[int, int]]:
    """Return (op, step) of all spans except those that are not predictable."""
    ignored = (Op.GC, Op.STARTUP)
    return [(span.op, span.step) for span in unpack(reader.read()) if span.op not in ignored]


def numbers(reader: RingReader) -> list[int]:
    return [step for op, step in recorded(reader) if op == Op.STEP]


def test_each_block_is_a_step_and_begins_with_the_wait_before_it(reader: RingReader) -> None:
    for _ in range(2):
        with paceline.data_wait():
            frames = reader.view().frames
        with paceline.step():
            inside = reader.view().frames
    found = list(unpack(reader.read()))
    spans = [span for span in found if span.op in (Op.DATA_WAIT, Op.STEP)]
    assert [(span.op, span.step) for span in spans] == [
        (Op.DATA_WAIT, 0),
        (Op.STEP, 0),
        (Op.DATA_WAIT, 1),
        (Op.STEP, 1),
    ]
    assert spans[0].start_ns == spans[1].start_ns
    assert [frame.op for frame in frames] == [Op.STEP, Op.DATA_WAIT]
    assert [frame.op for frame in inside] == [Op.STEP]
    assert reader.view().frames == []


def test_steps_have_the_numbers_that_they_are_given(reader: RingReader) -> None:
    with paceline.data_wait():
        pass
    with paceline.step(500):
        pass
    with paceline.step():
        assert reader.view().step == 501
    paceline.step_begin(700)
    paceline.step_end()
    assert numbers(reader) == [500, 501, 700]


@pytest.mark.parametrize("number", [-1, 2**32, 1.5, "3"])
def test_an_invalid_number_counts_on(
    reader: RingReader, number: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with paceline.step(4):
        pass
    with paceline.step(number):
        pass
    paceline.step_begin(number)
    paceline.step_end()
    assert numbers(reader) == [4, 5, 6]


def test_a_second_begin_ends_the_step_and_an_end_alone_does_nothing(reader: RingReader) -> None:
    paceline.step_end()
    paceline.step_begin()
    paceline.step_begin()
    paceline.step_end()
    paceline.step_end()
    assert numbers(reader) == [0, 1]


def test_a_wait_inside_a_step_is_part_of_it(reader: RingReader) -> None:
    with paceline.step(), paceline.data_wait(), paceline.data_wait():
        pass
    assert recorded(reader) == [(Op.DATA_WAIT, 0), (Op.STEP, 0)]


def test_nested_and_mixed_steps_count_once(reader: RingReader) -> None:
    with paceline.step(), paceline.step():
        paceline.step_begin()
        paceline.step_end()
    paceline.step_begin()
    with paceline.step(7):
        pass
    paceline.step_end()
    assert numbers(reader) == [0, 1]


def test_marked_steps_count_instead_of_iterations(reader: RingReader) -> None:
    for _ in paceline.steps([0, 1]):
        with paceline.step():
            pass
        with paceline.step():
            pass
    assert recorded(reader) == [
        (Op.DATA_WAIT, 0),
        (Op.STEP, 0),
        (Op.STEP, 1),
        (Op.DATA_WAIT, 2),
        (Op.STEP, 2),
        (Op.STEP, 3),
    ]


def test_a_marked_step_may_take_several_batches(reader: RingReader) -> None:
    batches = iter(paceline.steps(range(6)))
    for _ in range(2):
        with paceline.step():
            assert next(batches) < next(batches)
    assert numbers(reader) == [0, 1]
    assert list(batches) == [4, 5]
    assert numbers(reader) == []


def test_a_step_marked_inside_the_wait_of_a_loader_is_a_step(reader: RingReader) -> None:
    def loader() -> Iterator[int]:
        paceline.step_begin()
        yield 0
        paceline.step_end()

    assert list(paceline.steps(loader())) == [0]
    assert recorded(reader) == [(Op.DATA_WAIT, 0), (Op.STEP, 0)]
    assert reader.view().frames == []


def test_a_step_that_an_exception_ends_is_not_counted(reader: RingReader) -> None:
    with pytest.raises(KeyError), paceline.step():
        raise KeyError
    assert reader.view().frames == []
    with paceline.step():
        pass
    assert numbers(reader) == [0]


def test_other_threads_mark_nothing(reader: RingReader) -> None:
    def work() -> None:
        paceline.step_begin()
        with paceline.step(), paceline.data_wait():
            pass
        assert list(paceline.steps([3])) == [3]
        paceline.step_end()

    with paceline.step():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorded(reader) == [(Op.STEP, 0)]


def test_without_a_session_the_calls_do_nothing() -> None:
    paceline.step_begin(3)
    with paceline.step(), paceline.data_wait():
        paceline.step_end()


def test_communication_between_the_wait_and_the_block_belongs_to_the_step(
    reader: RingReader,
) -> None:
    with paceline.data_wait():
        pass
    with paceline.section("move"):
        pass
    with paceline.step():
        pass
    found = list(unpack(reader.read()))
    step = next(span for span in found if span.op == Op.STEP)
    moved = next(span for span in found if span.op >= 1024)
    assert moved.step == step.step
    assert step.start_ns <= moved.start_ns < moved.end_ns <= step.end_ns


def mark(numbers: range) -> None:
    for number in numbers:
        paceline.step_begin(number)
        paceline.step_end()


def test_a_training_that_numbers_its_steps_from_the_beginning_again_continues(
    reader: RingReader,
) -> None:
    """As in each epoch, or each fold of a cross-validation."""
    mark(range(3))
    mark(range(3))
    with paceline.step(0):
        pass
    paceline.checkpoint_saved(1)
    assert numbers(reader) == list(range(7))
    assert reader.view().saved_step == 7


def test_the_numbers_of_a_resumed_script_begin_again_too(reader: RingReader) -> None:
    mark(range(500, 503))
    mark(range(500, 502))
    mark(range(2))
    assert numbers(reader) == [500, 501, 502, 503, 504, 505, 506]


@pytest.mark.parametrize("again", [range(2, 4), range(1, 4)], ids=["one step", "later steps"])
def test_steps_that_are_done_again_keep_their_numbers(reader: RingReader, again: range) -> None:
    mark(range(3))
    mark(again)
    assert numbers(reader) == [0, 1, 2, *again]


def test_a_request_is_followed_at_the_recorded_step(reader: RingReader) -> None:
    mark(range(3))
    paceline.step_begin(0)
    assert hooks.recorded_step(0) == 3
    hooks.training_begins(1)
    assert hooks.recorded_step(1) == 4
    hooks.training_begins(0)
    paceline.step_end()
    assert hooks.recorded_step(0) == 3
