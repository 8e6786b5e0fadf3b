"""`paceline.steps`: boundaries, data waits, numbering, and loops that end early."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.torch_events import TorchEvents
from paceline_wire.ring import RingReader, StateView
from paceline_wire.spans import Op, Span, unpack


@pytest.fixture(autouse=True)
def _without_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """These loops have no optimizer; earlier tests of this process may have created some."""
    monkeypatch.setattr(TorchEvents, "has_optimizer", lambda _: False)


def spans(reader: RingReader) -> list[Span]:
    return list(unpack(reader.read()))


def recorded(reader: RingReader) -> list[tuple[int, int]]:
    """Return (op, step) of all spans except the garbage collector's, which are not predictable."""
    return [(span.op, span.step) for span in spans(reader) if span.op != Op.GC]


def test_each_iteration_is_a_step_that_contains_its_data_wait(reader: RingReader) -> None:
    batches = list(paceline.steps(["a", "b"]))
    assert batches == ["a", "b"]
    found = spans(reader)
    assert [span.op for span in found if span.op != Op.GC] == [
        Op.STARTUP,
        Op.DATA_WAIT,
        Op.STEP,
        Op.DATA_WAIT,
        Op.STEP,
    ]
    wait, step = (next(s for s in found if s.op == op) for op in (Op.DATA_WAIT, Op.STEP))
    assert step.start_ns == wait.start_ns
    assert wait.end_ns <= step.end_ns


def test_startup_lasts_from_the_process_start_to_the_first_step(reader: RingReader) -> None:
    list(paceline.steps([0]))
    found = {span.op: span for span in spans(reader)}
    assert found[Op.STARTUP].end_ns == found[Op.STEP].start_ns
    assert found[Op.STARTUP].start_ns < reader.identity.started_ns


def test_steps_count_from_start_and_continue_in_the_next_loop(reader: RingReader) -> None:
    list(paceline.steps([0, 0], start=40))
    list(paceline.steps([0]))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [40, 41, 42]


def test_a_start_from_the_beginning_again_continues(reader: RingReader) -> None:
    """As in each epoch, or in each of several trainings."""
    for _ in range(2):
        list(paceline.steps([0, 0, 0], start=0))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == list(range(6))


@pytest.mark.parametrize("start", [-3, 2**32, 3.0, "3", [3]])
def test_an_invalid_start_counts_from_zero(
    reader: RingReader, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(paceline.steps(["a"], start=start)) == ["a"]
    assert list(paceline.steps(["b"])) == ["b"]
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]


def test_the_page_shows_the_step_and_the_wait_for_data(reader: RingReader) -> None:
    def loader() -> Iterator[StateView]:
        yield reader.view()

    waiting, training = next(
        (waiting, reader.view()) for waiting in paceline.steps(loader(), start=7)
    )
    assert (waiting.step, training.step) == (7, 7)
    assert [frame.op for frame in waiting.frames] == [Op.STEP, Op.DATA_WAIT]
    assert [frame.op for frame in training.frames] == [Op.STEP]
    assert training.status == "running"
    assert reader.view().frames == []


def test_a_break_after_work_counts_the_step(reader: RingReader) -> None:
    for batch in paceline.steps([0, 1, 2]):
        with paceline.optimizer():
            pass
        if batch == 1:
            break
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]
    assert reader.view().frames == []


def test_a_break_before_any_work_counts_no_step(reader: RingReader) -> None:
    for batch in paceline.steps([0, 1, 2]):
        if batch == 1:
            break
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0]


def test_an_error_in_the_loop_reaches_the_user_and_leaves_a_clean_page(
    reader: RingReader,
) -> None:
    def train() -> None:
        with paceline.section("outer"):
            for _ in paceline.steps([0]):
                with paceline.pipelining(paceline.Op.FORWARD, microbatch=3):
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    view = reader.view()
    assert view.frames == []
    assert view.microbatch is None
    list(paceline.steps([0]))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]


def test_an_error_of_the_loader_reaches_the_user(reader: RingReader) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(paceline.steps(loader()))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0]
    assert reader.view().frames == []


def test_a_loader_wrapped_before_init_is_recorded(ring_directory: Path) -> None:
    loader = paceline.steps([0, 1])
    paceline.init()
    list(loader)
    with closing(RingReader(ring_directory / "local.g0.r0.ring")) as reader:
        assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]
    paceline.finish()
    assert list(loader) == [0, 1]


def test_a_wrapped_loader_can_be_pickled_and_continues(reader: RingReader) -> None:
    list(pickle.loads(pickle.dumps(paceline.steps([0, 1]))))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]


class Batch:
    """A batch that a weak reference can watch."""


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_that_the_script_frees_is_not_kept(reader: RingReader, nested: bool) -> None:
    outer = iter(paceline.steps([0]))
    if nested:
        next(outer)
    freed = []
    for batch in paceline.steps(Batch() for _ in range(2)):
        kept = weakref.ref(batch)
        del batch
        freed.append(kept() is None)
    assert freed == [True, True]


def test_a_nested_loop_records_no_steps(reader: RingReader) -> None:
    for _ in paceline.steps([0]):
        assert list(paceline.steps([7, 8])) == [7, 8]
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0]


def test_the_next_epoch_continues_with_an_iterator_kept_by_hand(reader: RingReader) -> None:
    batches = iter(paceline.steps([0, 1, 2]))
    for _ in range(3):
        for _ in range(2):
            next(batches)
            with paceline.optimizer():
                pass
        batches = iter(paceline.steps([0, 1, 2]))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1, 2, 3, 4, 5]


def test_a_start_applies_to_the_first_epoch_only(reader: RingReader) -> None:
    loader = paceline.steps([0, 0], start=40)
    for _ in range(2):
        list(loader)
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [40, 41, 42, 43]


def test_the_first_of_two_interleaved_loops_counts_steps(reader: RingReader) -> None:
    pairs = zip(paceline.steps([0, 1]), paceline.steps([2, 3]), strict=True)
    assert list(pairs) == [(0, 2), (1, 3)]
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0, 1]


def test_a_nested_loop_leaves_its_loader_open(reader: RingReader) -> None:
    inner = (number for number in range(3))
    for _ in paceline.steps([0]):
        for _ in paceline.steps(inner):
            break
    assert list(inner) == [1, 2]


def test_steps_have_the_length_of_their_loader(reader: RingReader) -> None:
    assert len(paceline.steps([1, 2, 3])) == 3
    with pytest.raises(TypeError, match="generator has no len"):
        len(paceline.steps(x for x in [1]))


def test_steps_have_the_attributes_of_their_loader() -> None:
    class Loader(list[int]):
        batch_size = 32

        def set_epoch(self, epoch: int) -> None:
            self.append(epoch)

    wrapped = paceline.steps(Loader())
    assert not wrapped
    wrapped.set_epoch(3)
    assert wrapped.batch_size == 32
    again = pickle.loads(pickle.dumps(paceline.steps([3])))
    assert list(wrapped) == list(copy.copy(again)) == [3]
    assert paceline.steps(x for x in [1])
    with pytest.raises(AttributeError, match=r"object has no attribute 'sampler'"):
        wrapped.sampler  # noqa: B018


def test_reported_values_are_on_the_page_with_their_step(reader: RingReader) -> None:
    for _ in paceline.steps([0], start=5):
        paceline.report(loss=1.5, gradient_norm=0.25)
        paceline.report(evaluation_loss=2.5)
    view = reader.view()
    assert (view.loss_step, view.loss, view.gradient_norm) == (5, 1.5, 0.25)
    assert (view.evaluation_step, view.evaluation_loss) == (5, 2.5)


def test_a_missing_norm_and_an_overflowed_norm_differ_on_the_page(reader: RingReader) -> None:
    for step in paceline.steps([0, 1]):
        paceline.report(loss=float("nan"), gradient_norm=float("nan") if step else None)
        expected = float("inf") if step else None
        assert reader.view().gradient_norm == expected
    loss = reader.view().loss
    assert loss is not None
    assert loss != loss


def test_a_value_that_is_not_a_number_is_counted_not_raised(
    reader: RingReader, caplog: pytest.LogCaptureFixture
) -> None:
    paceline.report(loss="high")
    assert reader.view().loss is None


def test_an_invalid_second_init_leaves_the_first(
    reader: RingReader, caplog: pytest.LogCaptureFixture
) -> None:
    class Uncertain(dict[str, str]):
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    paceline.init(metadata=Uncertain())
    list(paceline.steps([0]))
    assert [step for op, step in recorded(reader) if op == Op.STEP] == [0]


def test_inert_steps_iterate_over_the_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PACELINE_RING_DIRECTORY", raising=False)
    paceline.init()
    assert list(paceline.steps([1, 2])) == [1, 2]
    assert list(tmp_path.iterdir()) == []
