"""Sections, pipeline actions and status sections, as the agent reads them."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import paceline
from paceline.recorder import Recorder
from paceline.writer.interface import Timed
from paceline_wire.ring import FRAMES, GroupDefinition, RingReader, SectionDefinition
from paceline_wire.spans import Op, Span, op_name, unpack


def spans(reader: RingReader) -> list[Span]:
    return [span for span in unpack(reader.read()) if span.op != Op.GC]


def names(reader: RingReader) -> dict[str, str]:
    return {
        op_name(1024 + definition.id): definition.name
        for definition in reader.new_definitions()
        if isinstance(definition, SectionDefinition)
    }


def test_sections_are_recorded_inner_first_under_their_names(reader: RingReader) -> None:
    with paceline.section("outer"), paceline.section("inner"):
        pass
    inner, outer = spans(reader)
    assert outer.start_ns <= inner.start_ns
    assert inner.end_ns <= outer.end_ns
    section_names = names(reader)
    assert [section_names[op_name(span.op)] for span in (inner, outer)] == ["inner", "outer"]


def test_a_name_is_defined_once(reader: RingReader) -> None:
    for _ in range(3):
        with paceline.section("again"):
            pass
    assert len({span.op for span in spans(reader)}) == 1
    assert list(names(reader).values()) == ["again"]


def test_a_section_may_nest_in_itself(reader: RingReader) -> None:
    def descend(levels: int) -> None:
        with paceline.section("recursive"):
            assert len(reader.view().frames) == 4 - levels
            if levels > 1:
                descend(levels - 1)

    descend(3)
    found = spans(reader)
    assert len(found) == 3
    for inner, outer in itertools.pairwise(found):
        assert outer.start_ns <= inner.start_ns
        assert inner.end_ns <= outer.end_ns
    assert reader.view().frames == []


def test_sections_deeper_than_the_page_are_still_recorded(reader: RingReader) -> None:
    def descend(levels: int) -> None:
        with paceline.section(f"level {levels}"):
            if levels:
                descend(levels - 1)
            else:
                assert len(reader.view().frames) == FRAMES

    descend(FRAMES + 3)
    assert len(spans(reader)) == FRAMES + 4
    view = reader.view()
    assert view.frames == []
    assert view.groups == []  # the words after the frames are unchanged


def test_a_section_left_by_an_error_is_closed(reader: RingReader) -> None:
    with pytest.raises(ZeroDivisionError), paceline.section("broken"):
        raise ZeroDivisionError
    assert len(spans(reader)) == 1
    assert reader.view().frames == []


def test_records_inside_an_action_have_its_microbatch_and_chunk(reader: RingReader) -> None:
    for _ in paceline.steps([0], start=9):
        with paceline.pipelining(Op.FORWARD, microbatch=3, chunk=1):
            assert reader.view().microbatch == 3
            with paceline.section("attention"):
                pass
        assert reader.view().microbatch is None
        with paceline.section("after"):
            pass
    inside, action, after = [s for s in spans(reader) if s.op >= 1024 or s.op == Op.FORWARD]
    assert (inside.step, inside.microbatch, inside.chunk) == (9, 3, 1)
    assert (action.op, action.microbatch, action.chunk) == (Op.FORWARD, 3, 1)
    assert (after.microbatch, after.chunk) == (None, None)


def test_lengths_are_recorded_as_their_sum_and_the_sum_of_their_squares(
    reader: RingReader,
) -> None:
    for lengths in ([3, 4], None, [10]):
        with paceline.pipelining(Op.FORWARD, microbatch=3, chunk=1, lengths=lengths):
            pass
    found = [(span.microbatch, span.chunk, span.bytes, span.sequence) for span in spans(reader)]
    assert found == [(3, 1, 7, 25), (3, 1, 0, 0), (3, 1, 10, 100)]


@pytest.mark.parametrize(
    "lengths", [["long"], 7, [-3, 1], [0.5], [2**40], [float("nan")], [float("inf")]]
)
def test_invalid_lengths_are_left_out(
    reader: RingReader, lengths: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with paceline.pipelining(Op.BACKWARD, microbatch=1, lengths=lengths):
        pass
    (span,) = spans(reader)
    assert (span.op, span.microbatch, span.bytes, span.sequence) == (Op.BACKWARD, 1, 0, 0)


def test_a_transfer_has_no_lengths(reader: RingReader) -> None:
    with paceline.pipelining(Op.FORWARD_SEND, microbatch=0, lengths=[5]):
        pass
    (span,) = spans(reader)
    assert (span.bytes, span.sequence) == (0, 0)


def test_actions_nest(reader: RingReader) -> None:
    with paceline.pipelining(Op.BACKWARD, microbatch=1):
        with paceline.pipelining(Op.FORWARD, microbatch=2):
            pass
        assert reader.view().microbatch == 1
    assert [(s.op, s.microbatch) for s in spans(reader)] == [(Op.FORWARD, 2), (Op.BACKWARD, 1)]


def test_a_transfer_outside_torch_shows_its_peer(reader: RingReader) -> None:
    with paceline.pipelining(Op.FORWARD_SEND, microbatch=0, peer=5):
        (frame,) = reader.view().frames
        assert frame.peer == 5
    with paceline.section("next"):
        (frame,) = reader.view().frames
        assert frame.peer is None
    assert spans(reader)[0].peer == 5


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, 0, 999])
def test_an_op_that_is_not_an_action_is_not_recorded(reader: RingReader, op: int) -> None:
    with paceline.pipelining(op, microbatch=0):  # type: ignore[arg-type]
        pass
    assert spans(reader) == []


@pytest.mark.parametrize(
    "place",
    [
        {"microbatch": -1},
        {"microbatch": 2**32},
        {"microbatch": 1.5},
        {"microbatch": ""},
        {"microbatch": []},
        {"chunk": 0xFFFF},
        {"chunk": None},
        {"peer": -1},
        {"peer": "rank 3"},
    ],
)
def test_an_action_with_an_invalid_position_is_not_recorded(
    reader: RingReader, place: dict[str, Any]
) -> None:
    with paceline.pipelining(Op.FORWARD, **place), paceline.section("inside"):
        pass
    assert [span.op for span in spans(reader)] == [1024]


def test_numpy_integers_are_accepted(reader: RingReader) -> None:
    for number in np.arange(2):
        with paceline.pipelining(Op.FORWARD, microbatch=number, chunk=number):
            pass
    assert [(span.microbatch, span.chunk) for span in spans(reader)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("name", [["a", "list"], "half a \udc80 character"])
def test_a_name_that_cannot_be_encoded_is_not_recorded(reader: RingReader, name: Any) -> None:
    with paceline.section(name), paceline.section("good"):
        pass
    assert list(names(reader).values()) == ["good"]
    assert len(spans(reader)) == 1


def test_a_name_that_is_not_a_string_is_converted(reader: RingReader) -> None:
    with paceline.section(3):  # type: ignore[arg-type]
        pass
    assert list(names(reader).values()) == ["3"]


@pytest.mark.parametrize(
    ("timed", "op", "status"),
    [
        (paceline.checkpoint, Op.CHECKPOINT, "checkpointing"),
        (paceline.evaluate, Op.EVALUATE, "evaluating"),
        (paceline.optimizer, Op.OPTIMIZER, "running"),
    ],
)
def test_the_page_shows_the_kind_of_work(
    reader: RingReader, timed: object, op: Op, status: str
) -> None:
    assert callable(timed)
    for _ in paceline.steps([0]):
        with timed():
            assert reader.view().status == status
            assert reader.view().frames[-1].op == op
        assert reader.view().status == "running"
    assert op in {span.op for span in spans(reader)}


@pytest.mark.parametrize("timed", [paceline.checkpoint, paceline.evaluate])
def test_finish_inside_a_checkpoint_stays_finished(
    reader: RingReader, timed: Callable[[], Timed]
) -> None:
    """A SIGTERM handler may call `finish` there."""
    for _ in paceline.steps([0]):
        with timed(), timed():
            paceline.finish()
    assert reader.view().status == "finished"


def test_a_section_of_another_thread_is_recorded_at_the_boundary(reader: RingReader) -> None:
    def work() -> None:
        with paceline.section("shared"):
            pass

    for _ in paceline.steps([0]):
        with paceline.section("shared"):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert [frame.op for frame in reader.view().frames] == [Op.STEP, 1024]
    assert [span.op for span in spans(reader)].count(1024) == 2


def test_a_full_queue_loses_only_records_of_other_threads(ring: Recorder) -> None:
    for number in range(5000):
        ring.enqueue((1, 2, 3, 4, 5, number, 7))
    assert ring.lost == 5000 - 4096
    ring.drain()
    assert ring.head == 4096


@pytest.fixture
def without_gc() -> Iterator[None]:
    """No garbage collection, whose pauses are records too."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_an_overrun_is_counted_by_the_reader(small: RingReader) -> None:
    for _ in range(1000):
        with paceline.section("busy"):
            pass
    found = list(unpack(small.read()))
    assert small.lost + len(found) == 1000
    assert [span.index for span in found] == list(range(small.lost, 1000))


def test_a_long_garbage_collection_is_recorded(reader: RingReader) -> None:
    for _ in paceline.steps([0]):
        garbage = [[index] for index in range(200_000)]
        gc.collect()
        del garbage
    pauses = [span for span in unpack(reader.read()) if span.op == Op.GC]
    assert pauses
    assert all(pause.duration_ns >= 100_000 for pause in pauses)


def test_too_many_names_are_refused(reader: RingReader, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5000):
        with paceline.section(f"step {number}"):
            pass
    assert 1000 < len(names(reader)) <= 4096
    assert "section names" in caplog.text


def test_process_groups_are_defined_even_after_too_many_names(
    reader: RingReader, caplog: pytest.LogCaptureFixture
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in paceline.steps([0]):
        for number in range(5000):
            with paceline.section(f"a name that is not short at all {number}"):
                pass
        dist.barrier()
    dist.destroy_process_group()
    assert reader.new_definitions()[-1] == GroupDefinition(0, "world", [0], "world")


def test_a_very_long_name_is_truncated(reader: RingReader) -> None:
    with paceline.section("x" * 1_000_000):
        pass
    assert list(names(reader).values()) == ["x" * 200]
