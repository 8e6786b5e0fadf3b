"""A block equals its samples; its series are sent to another process only when they change."""

from __future__ import annotations

import math

import msgspec
import pytest

from paceline_agent.collect.blocks import (
    ColumnReader,
    ColumnWriter,
    PackedColumns,
    Recurring,
    Series,
    SeriesBlock,
    count,
    each,
)
from paceline_wire.batch import Batch, Sample, decode, encode

AT_NS = 2**63 - 1


def series(*gpus: int) -> Series:
    return Series([("clock", {"gpu": str(gpu)}) for gpu in gpus])


def across(columns: list[PackedColumns]) -> list[PackedColumns]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(columns), type=list[PackedColumns])


def test_a_value_that_is_not_finite_is_one_that_is_not_there() -> None:
    block = SeriesBlock(series(0, 1, 2, 3), [math.nan, 0.1, math.inf, -math.inf], AT_NS)
    there = [Sample("clock", {"gpu": "1"}, 0.1, AT_NS)]
    assert len(block) == count([block]) == 1
    assert list(each([block])) == there
    batch = Batch(agent_id="node-0", boot_id="boot", sequence=0, packed_ns=1)
    batch = msgspec.structs.replace(batch, samples=there, blocks=[block.packed, block.packed])
    assert decode(encode(batch)).samples == 3 * there


def test_samples_and_blocks_go_together() -> None:
    plain = Sample("up", {}, 1.0, 7)
    brought = [plain, SeriesBlock(series(0, 1), [1.0, 2.0], 7), plain]
    assert count(brought) == 4
    assert [one.value for one in each(brought)] == [1.0, 1.0, 2.0, 1.0]


def test_series_are_sent_when_they_change_and_values_each_time() -> None:
    writer, reader = ColumnWriter(), ColumnReader()
    one, other = series(0, 1), series(1)
    sweeps = [
        [SeriesBlock(one, [0.1, 1.1], 7)],
        [SeriesBlock(one, [0.2, math.nan], 8)],
        [SeriesBlock(one, [0.3, 1.3], 9), SeriesBlock(other, [1.4], 9)],
        [SeriesBlock(other, [1.5], 10)],
        [],
        [SeriesBlock(other, [1.6], 11)],
    ]
    sent = []
    for sweep in sweeps:
        columns = across(writer.write(sweep))
        sent.append([bool(one.series) for one in columns])
        assert list(each(reader.read(columns))) == list(each(sweep))
    assert sent == [[True], [False], [False, True], [True], [], [True]]


def test_columns_without_their_series_are_refused() -> None:
    writer, reader = ColumnWriter(), ColumnReader()
    block = SeriesBlock(series(0), [0.1], 7)
    writer.write([block])
    with pytest.raises(ValueError, match="never sent"):
        reader.read(across(writer.write([block])))


def test_series_that_recur_are_packed_once() -> None:
    recurring, packed = Recurring(), []

    def block(*gpus: int) -> SeriesBlock:
        made = recurring.block(
            gpus, lambda: [("clock", {"gpu": str(gpu)}) for gpu in gpus], gpus, 7
        )
        packed.append(made.series)
        return made

    for gpus in ((0, 1), (0, 1), (1,), (), (0, 1)):
        assert [one.labels["gpu"] for one in block(*gpus).samples()] == [*map(str, gpus)]
    assert packed[0] is packed[1]
    assert packed[1] is not packed[4]
