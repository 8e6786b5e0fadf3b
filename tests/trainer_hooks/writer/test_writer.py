"""The hot path in C writes the same words as the reference in Python, in any order of calls."""

from __future__ import annotations

import gc
import shutil
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import writer
from paceline.writer import pure_python
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    STATE_DEPTH,
    STATE_FRAMES,
    STATE_GROUPS,
    STATE_STEP_STARTED_NS,
)
from paceline_wire.spans import NONE_32, RECORD_BYTES, Op, unpack

CAPACITY = 16
built = pytest.mark.skipif(
    writer.Collective is None and shutil.which("cc") is None, reason="no C compiler here"
)


def test_the_c_writer_is_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    assert writer.Collective is not None
    assert writer.Writer is not pure_python.Writer


@pytest.mark.parametrize(
    ("environment", "module"),
    [
        ({"PACELINE_PURE_PYTHON": "1"}, types.SimpleNamespace(LAYOUT=writer.LAYOUT)),
        ({}, types.SimpleNamespace(LAYOUT=())),  # built from another version's source
        ({}, None),  # not built
    ],
)
def test_an_outdated_or_unwanted_build_is_not_used(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], module: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr("paceline.writer._native", raising=False)
    monkeypatch.setitem(sys.modules, "paceline.writer._native", module)
    assert writer._load_native() is None


# The same words


class Implementation:
    """One of the two implementations, with its own memory."""

    def __init__(self, module: Any) -> None:
        self.state = memoryview(bytearray(4096)).cast("Q")
        self.spans = memoryview(bytearray(CAPACITY * RECORD_BYTES))
        self.writer = module.Writer(self.state, self.spans)
        self.sections = [
            *(module.Section(self.writer, 1024 + number) for number in range(2)),
            module.Pipelining(self.writer, Op.FORWARD, 3, 1, None),
            module.Pipelining(self.writer, Op.BACKWARD_SEND, None, 0, 7),
        ]
        base = STATE_GROUPS
        self.channel = module.Channel(self.state, base, base + 1, base + 2, base + 3, 5)
        self.open: list[Any] = []

    def do(self, name: str, words: tuple[int, ...]) -> object:
        if name == "enter":
            section = self.sections[words[0] % 4]
            section.__enter__()
            self.open.append(section)
            return None
        if name in ("exit", "close"):
            if not self.open:
                return None
            section = self.open.pop()
            return section.__exit__(None, None, None) if name == "exit" else section.close()
        if name == "size":
            for section in self.sections[2:]:
                section.size, section.sequence, section.peer = words[:3]
            return None
        if name == "report":
            floats = struct.unpack("<3d", struct.pack("<3Q", *words[:3]))
            values = [
                number if word % 3 else None for word, number in zip(words, floats, strict=False)
            ]
            return self.writer.report(words[3] & NONE_32, *values)
        if name == "channel enter":
            return self.channel.enter(*words[:2])
        if name == "channel leave":
            return self.channel.leave(words[0])
        if name == "place":
            self.writer.word2, self.writer.chunk = words[0], words[1] & 0xFFFF
            return None
        if name == "pop":
            return self.writer.pop(words[0] % 12)
        count = {"write": 7, "write_simple": 3, "push": 4, "begin_step": 1}.get(name, 0)
        given = words[:count]
        if name == "write_simple":  # time does not go back
            given = (words[0] & 0xFFFF, *sorted(words[1:3]))
        if name == "begin_step":
            given = (words[0] & NONE_32,)
        return getattr(self.writer, name)(*given)

    def words(self) -> tuple[list[int], list[list[int]], tuple[int, ...]]:
        """Return state, records and counters, without times."""
        state = self.state.tolist()
        state[STATE_STEP_STARTED_NS] = 0
        for depth in range(FRAMES):
            state[STATE_FRAMES + depth * FRAME_WORDS + 1] = 0
        words = self.spans.cast("Q").tolist()
        records = [words[at : at + 6] for at in range(0, len(words), 8)]
        writer = self.writer
        counts = (writer.head, writer.depth, writer.step, writer.step_head)
        return state, records, (*counts, writer.word2, writer.chunk)


WORD = st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1))
NAMES = (
    *("enter", "enter", "exit", "exit", "close", "push", "pop", "write", "write_simple"),
    *("begin_step", "end_data_wait", "end_step", "size", "report", "clear_place", "clear_frames"),
    *("place", "channel enter", "channel leave"),
)
CALLS = st.tuples(st.sampled_from(NAMES), st.tuples(*[WORD] * 7))


@built
@settings(max_examples=150, deadline=None)
@given(st.lists(CALLS, max_size=60))
def test_c_and_python_write_the_same_words(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    native, reference = Implementation(writer), Implementation(pure_python)
    for name, words in calls:
        assert native.do(name, words) == reference.do(name, words), name
    assert native.words() == reference.words()


@built
@pytest.mark.parametrize("module", [writer, pure_python])
@pytest.mark.parametrize("row", [(-1,) * 7, (2**64,) * 7, ("x",) * 7, (1, 2)])
def test_a_row_that_does_not_fit_a_record_is_refused(module: Any, row: tuple[Any, ...]) -> None:
    implementation = Implementation(module)
    with pytest.raises((TypeError, OverflowError, struct.error)):
        implementation.writer.write(*row)
    assert implementation.writer.head == 0


@built
@pytest.mark.parametrize("module", [writer, pure_python])
def test_fast_paths_are_for_the_owner_thread_only(module: Any) -> None:
    implementation = Implementation(module)
    implementation.writer.sections["x"] = implementation.sections[0]

    def fast_paths() -> list[Any]:
        sections = [implementation.writer.find_section(name) for name in ("x", "y", [])]
        return [*sections, implementation.writer.try_report(1.0, None, None)]

    assert fast_paths() == [implementation.sections[0], None, None, True]
    assert implementation.writer.try_report("high", None, None) is False
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(fast_paths()))
    thread.start()
    thread.join()
    assert results == [None, None, None, False]
    implementation.writer.timer = object()
    assert fast_paths() == [implementation.sections[0], None, None, False]


@built
def test_memory_that_is_not_a_ring_is_refused() -> None:
    state = memoryview(bytearray(4096)).cast("Q")
    for spans in (bytearray(63), bytearray(3 * RECORD_BYTES), bytes(RECORD_BYTES)):
        with pytest.raises((ValueError, BufferError)):
            writer.Writer(state, memoryview(spans))
    with pytest.raises(ValueError, match="words"):
        writer.Writer(state[:100], memoryview(bytearray(RECORD_BYTES)))
    with pytest.raises((TypeError, RuntimeError)):
        writer.Section.__new__(writer.Section).__enter__()


# Collectives


class Group:
    """A process group; only its identity matters."""


class Load:
    @property
    def nbytes(self) -> int:
        return 400


class OtherLoad:
    nbytes = 400


class TimedCollective:
    """A collective of the C writer around a function of the test."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.implementation = Implementation(writer)
        self.implementation.writer.clear_place()  # as a recorder does
        self.world, self.other = Group(), Group()
        self.owner = types.SimpleNamespace(WORLD=self.world)
        self.slow_calls: list[tuple[Any, Any]] = []
        self.lookups: list[Any] = []
        self.channel = writer.Channel(
            self.implementation.state,
            *range(STATE_GROUPS, STATE_GROUPS + 4),
            group=5,
            reference=weakref.ref(self.world),
        )
        self.call = writer.Collective(
            recorder=self.implementation.writer,
            op=int(Op.ALL_REDUCE),
            original=original,
            slow_path=self._slow_path,
            channels={id(self.world): self.channel},
            find_channel=self._find,
            default_owner=self.owner,
            default_name="WORLD",
            payload="tensor",
            tensor=Load,
            group_position=1,
            async_position=2,
            payload_position=0,
        )

    def _slow_path(self, args: Any, kwargs: Any) -> str:
        self.slow_calls.append((args, kwargs))
        return "slow path"

    def _find(self, group: Any) -> Any:
        self.lookups.append(group)

    def spans(self) -> list[Any]:
        return list(
            unpack(
                bytes(self.implementation.spans[: self.implementation.writer.head * RECORD_BYTES])
            )
        )

    def is_idle(self) -> bool:
        frame = STATE_FRAMES + self.implementation.writer.depth * FRAME_WORDS
        free = self.implementation.state[frame + 2 : frame + 4].tolist() == [NONE_32, 0]
        return (
            not self.implementation.writer.in_call
            and self.implementation.state[STATE_DEPTH] == 0
            and free
        )


@built
@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((Load(),), {}, 400),
        ((), {"tensor": Load(), "group": None, "async_op": False}, 400),
        (([Load(), OtherLoad()],), {}, 800),
        ((None,), {}, 0),
    ],
)
def test_a_collective_is_in_flight_while_it_runs_and_a_span_afterwards(
    args: Any, kwargs: Any, size: int
) -> None:
    seen: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        frame = timed.implementation.state[STATE_FRAMES : STATE_FRAMES + 4].tolist()
        seen.append((args, kwargs, frame[0], frame[2:], timed.implementation.state[STATE_DEPTH]))
        return "result"

    timed = TimedCollective(original)
    assert timed.call(*args, **kwargs) == "result"
    assert seen == [(args, kwargs, Op.ALL_REDUCE, [5 << 32 | NONE_32, 1], 1)]
    (span,) = timed.spans()
    assert (span.op, span.group, span.bytes, span.sequence) == (Op.ALL_REDUCE, 5, size, 1)
    assert timed.implementation.state[STATE_GROUPS : STATE_GROUPS + 2].tolist() == [1, 1]
    assert timed.is_idle()


@built
def test_an_error_of_the_collective_reaches_the_caller() -> None:
    def original(tensor: Any) -> None:
        raise RuntimeError("the peer is gone")

    timed = TimedCollective(original)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        timed.call(Load())
    assert timed.spans() == []
    # Entered and never left: the sign of a hang.
    assert timed.implementation.state[STATE_GROUPS : STATE_GROUPS + 2].tolist() == [1, 0]
    assert timed.is_idle()


@built
def test_a_collective_inside_a_collective_is_not_timed() -> None:
    timed = TimedCollective(lambda tensor: timed.call(None) if tensor is not None else "inner")
    assert timed.call(Load()) == "inner"
    assert len(timed.spans()) == 1


@built
def test_other_calls_take_the_slow_path() -> None:
    timed = TimedCollective(lambda *args, **kwargs: "original")
    assert timed.call("t", None, True) == "slow path"
    assert timed.call("t", async_op=True) == "slow path"
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(timed.call("t", group=None)))
    thread.start()
    thread.join()
    assert answers == ["slow path"]
    timed.implementation.writer.timer = object()
    assert timed.call("t") == "slow path"
    assert timed.slow_calls == [
        (("t", None, True), {}),
        (("t",), {"async_op": True}),
        (("t",), {"group": None}),
        (("t",), {}),
    ]


@built
def test_a_group_without_this_rank_is_looked_up_and_not_timed() -> None:
    timed = TimedCollective(lambda *args, **kwargs: "original")
    assert timed.call(Load(), timed.other) == "original"
    assert timed.call(Load(), group=timed.other) == "original"
    assert timed.lookups == [timed.other, timed.other]
    assert (timed.spans(), timed.implementation.writer.failures) == ([], 0)


@built
def test_a_group_that_reuses_the_id_of_a_dead_one_is_another() -> None:
    timed = TimedCollective(lambda *args, **kwargs: "original")
    place = id(timed.world)
    assert timed.call(Load(), timed.world) == "original"
    assert (len(timed.spans()), timed.lookups) == (1, [])
    timed.world = timed.owner.WORLD = Group()
    groups = [Group() for _ in range(1000)]
    other = next(group for group in groups if id(group) == place)
    assert timed.call(Load(), other) == "original"
    assert (len(timed.spans()), timed.lookups) == (1, [other])


class Broken:
    @property
    def nbytes(self) -> int:
        raise ValueError("an error of Paceline")


@built
@pytest.mark.parametrize("load", [Broken(), [Load(), Broken()], object()])
def test_an_error_of_paceline_is_counted_and_the_call_continues(load: Any) -> None:
    timed = TimedCollective(lambda tensor: "original")
    assert timed.call(load) == "original"
    assert (timed.spans(), timed.implementation.writer.failures) == ([], 1)
    assert timed.is_idle()


@built
def test_a_call_leaks_no_reference() -> None:
    def original(tensor: Any, group: Any = None) -> None:
        if isinstance(tensor, str):
            raise ValueError(tensor)

    timed = TimedCollective(original)
    calls: list[tuple[Any, ...]] = [(Load(),), (Load(), timed.other), ([Load()],), (Broken(),)]
    objects = [timed.world, timed.other, timed.channel, original, None, *calls]
    before = [sys.getrefcount(item) for item in objects]
    for _ in range(500):
        for call in calls:
            timed.call(*call)
        with timed.implementation.sections[0], timed.implementation.sections[0]:
            pass
    timed.lookups.clear()
    after = [sys.getrefcount(item) for item in objects]
    growth = [b - a for a, b in zip(before, after, strict=True)]
    assert max(growth) < 100  # one leak per call would be 500


@built
def test_the_c_objects_are_collected_in_a_cycle() -> None:
    timed = TimedCollective(lambda tensor: None)
    section = timed.implementation.sections[0]
    timed.implementation.writer.timer = [timed.implementation.writer, section, timed.call]
    world = weakref.ref(timed.world)
    del timed, section
    gc.collect()
    assert world() is None
