"""The hot path in C writes the same words as the Python reference, for any order of calls."""

from __future__ import annotations

import shutil
import struct
import sys
import threading
import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import writer
from paceline.writer import pure_python
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    STATE_FRAMES,
    STATE_GROUPS,
    STATE_STEP_STARTED_NS,
)
from paceline_wire.spans import NONE_32, RECORD_BYTES, Op

CAPACITY = 16
built = pytest.mark.skipif(
    writer.Writer is pure_python.Writer and shutil.which("cc") is None, reason="no C compiler here"
)


def test_the_c_writer_is_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    assert writer.Writer is not pure_python.Writer
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
        if name == "write_simple":  # time must not go back
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
@settings(max_examples=150)
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
