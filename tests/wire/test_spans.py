"""Records survive the conversion to packed columns and back; fragments are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_wire.spans import (
    NONE_16,
    NONE_32,
    RECORD,
    RECORD_BYTES,
    Op,
    from_columns,
    op_name,
    to_columns,
    unpack,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
rows = st.tuples(u64, u16, u16, u16, u16, u32, u32, u32, st.just(0), u64, u64, u64, u64)
records = st.lists(rows, max_size=40).map(lambda many: b"".join(RECORD.pack(*row) for row in many))


@given(records)
def test_columns_are_converted_back_to_the_records(block: bytes) -> None:
    assert from_columns(to_columns(block)) == block


@given(rows)
def test_a_span_has_the_values_of_its_record(row: tuple[int, ...]) -> None:
    (span,) = unpack(RECORD.pack(*row))
    assert (span.index, span.op, span.group, span.flags) == (row[0], row[1], row[2], row[4])
    assert span.chunk == (None if row[3] == NONE_16 else row[3])
    assert span.step == row[5]
    assert span.microbatch == (None if row[6] == NONE_32 else row[6])
    assert span.peer == (None if row[7] == NONE_32 else row[7])
    assert (span.bytes, span.sequence) == (row[9], row[10])
    assert (span.start_ns, span.duration_ns) == (row[11], row[12])
    assert span.end_ns == row[11] + row[12]


def test_a_column_holds_one_word_of_every_record() -> None:
    block = b"".join(RECORD.pack(i, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1000 + i, 7) for i in range(3))
    columns = to_columns(block)
    assert columns[:24] == b"".join(i.to_bytes(8, "little") for i in range(3))
    assert columns[-48:-24] == b"".join((1000 + i).to_bytes(8, "little") for i in range(3))


@pytest.mark.parametrize("length", [1, RECORD_BYTES - 1, RECORD_BYTES + 8])
def test_a_fragment_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        list(unpack(bytes(length)))
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        from_columns(bytes(length))


def test_every_op_has_a_name_also_an_unknown_one() -> None:
    assert op_name(Op.FORWARD_SEND) == "forward_send"
    assert op_name(1027) == "section:3"
    assert op_name(999) == "op:999"
