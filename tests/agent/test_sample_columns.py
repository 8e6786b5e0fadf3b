"""What a worker tells of its samples is what the agent has of them, whatever changed in between."""

from __future__ import annotations

import msgspec
import pytest

from paceline_agent.sample_columns import ColumnReader, Columns, ColumnWriter
from paceline_wire.batch import Sample


def across(columns: Columns) -> Columns:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(columns), type=Columns)


def samples(value: float, *gpus: int, time_ns: int = 7) -> list[Sample]:
    return [Sample("clock", {"gpu": str(gpu)}, value + gpu, time_ns) for gpu in gpus]


def test_series_are_told_when_they_change_and_values_each_time() -> None:
    writer, reader = ColumnWriter(), ColumnReader()
    sweeps = [
        samples(0.1, 0, 1),
        samples(0.2, 0, 1),
        samples(0.3, 1),
        [],
        samples(float("inf"), 1, 0),
        [*samples(1.0, 1, time_ns=8), *samples(2.0, 0, time_ns=2**63 - 1)],
    ]
    told = []
    for sweep in sweeps:
        columns = across(writer.write(sweep))
        told.append(columns.series is not None)
        assert reader.read(columns) == sweep
    assert told == [True, False, True, True, True, False]


def test_columns_without_their_series_are_refused() -> None:
    writer, reader = ColumnWriter(), ColumnReader()
    writer.write(samples(0.1, 0))
    with pytest.raises(ValueError, match="longer"):
        reader.read(across(writer.write(samples(0.2, 0))))
