"""Plain data is read as in Python; anything else is rejected and never executed."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.flight_recorder import plain_pickle
from paceline_server.flight_recorder.errors import (
    FlightRecorderError,
    HostileDumpError,
    MalformedDumpError,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=20,
)


@settings(max_examples=100)
@given(PLAIN, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    # Below protocol 3, Python writes a bytes object as a call, which must be rejected.
    data = pickle.dumps(value, protocol)
    if b"_codecs" in data or b"__builtin__" in data:
        with pytest.raises(HostileDumpError):
            plain_pickle.load(data)
    else:
        assert plain_pickle.load(data) == value


@pytest.mark.parametrize("protocol", [0, 1])
def test_the_oldest_protocols_are_read(protocol: int) -> None:
    value = {"entries": [{"a": 1, "b": (True, None), "c": 1.5, "d": -(2**40)}, ["x'y"], ()]}
    assert plain_pickle.load(pickle.dumps(value, protocol)) == value


class _Call:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_refused_and_not_made(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"version": "2.9", "entries": [_Call(tmp_path / "made")]}, protocol)
    with pytest.raises(HostileDumpError, match="was not executed"):
        plain_pickle.load(data)
    assert not (tmp_path / "made").exists()
    # The same bytes are harmful if they are trusted, so the check above is not vacuous.
    pickle.loads(data)
    assert (tmp_path / "made").exists()


HOSTILE = {
    "GLOBAL": b"cos\nsystem\n.",
    "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "NEWOBJ": b"]]\x81.",
    "NEWOBJ_EX": b"]]}\x92.",
    "BUILD": b"]}b.",
    "REDUCE": b"])R.",
    "PERSID": b"Pid\n.",
    "BINPERSID": b"K\x01Q.",
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "EMPTY_SET": b"\x8f.",
    "FROZENSET": b"(\x91.",
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "NEXT_BUFFER": b"\x97.",
    "LONG1": b"\x8a\xff" + b"\xff" * 255 + b".",
    "LONG4": b"\x8b" + struct.pack("<i", 1 << 24) + b"\x7f" * (1 << 24) + b".",
    "LONG": b"L" + b"9" * 1_000_000 + b"L\n.",
    "INT": b"I" + b"9" * 1_000_000 + b"\n.",
    "marks": b"(" * 1_000_000 + b".",
    "key that is costly to hash": b"})" + b"\x85" * 60 + b"K\x01s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_dump_holds_is_refused(name: str) -> None:
    with pytest.raises(HostileDumpError, match="a dump never does"):
        plain_pickle.load(HOSTILE[name])


def test_more_opcodes_than_a_dump_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes on the network become gigabytes of empty dicts."""
    value = {"entries": [[1, "x"], {"a": 2}]}
    opcodes = len(list(pickletools.genops(pickle.dumps(value))))
    monkeypatch.setattr(plain_pickle, "_OPCODES_LIMIT", opcodes)
    assert plain_pickle.load(pickle.dumps(value)) == value
    with pytest.raises(HostileDumpError, match=f"has more than {opcodes} opcodes"):
        plain_pickle.load(b"}" * (opcodes + 1) + b".")


CUT_OFF = {
    "nothing": b"",
    "no end": b"K\x01",
    "a string longer than the file": b"X\xff\xff\xff\xff",
    "a string of 2**60 bytes": b"\x8d" + struct.pack("<Q", 1 << 60),
    "a string of negative length": b"T" + struct.pack("<i", -5) + b"abc.",
    "an integer of negative length": b"\x8b" + struct.pack("<i", -5) + b"abc.",
    "a memo that was not set": b"h\x05.",
    "a pop of nothing": b"0.",
    "an append to nothing": b"K\x01a.",
    "an append to a number": b"K\x01K\x02a.",
    "an odd number of items": b"}(K\x01u.",
    "a mark that is not closed": b"(K\x01.",
    "a close without a mark": b"t.",
    "two values": b"K\x01K\x02.",
    "no opcode": b"\xff.",
    "a line without an end": b"I12",
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_an_incomplete_pickle_is_reported(name: str) -> None:
    with pytest.raises(MalformedDumpError, match="not a whole pickle"):
        plain_pickle.load(CUT_OFF[name])


def test_a_huge_memo_index_costs_nothing() -> None:
    assert plain_pickle.load(b"K\x01r\xff\xff\xff\xff.") == 1


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_end_in_plain_data_or_in_our_own_error(data: bytes) -> None:
    with contextlib.suppress(FlightRecorderError):
        plain_pickle.load(data)
