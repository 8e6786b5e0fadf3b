"""Samples as columns: most calls of a collector return the same series with new values.

A block of a hundred samples costs as much as a few single ones: its series are sent to another
process once and packed once for all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from paceline_wire import batch as wire
from paceline_wire.batch import Sample, SampleBlock, pack_series, pack_values


class Series:
    """Names and labels of the values of a block; the labels are never changed."""

    __slots__ = ("_rows", "packed")

    def __init__(self, rows: Sequence[wire.Series]) -> None:
        self._rows: Sequence[wire.Series] | None = rows
        self.packed = pack_series(rows)

    @classmethod
    def from_packed(cls, packed: bytes) -> Series:
        """Return series whose rows are unpacked on first use."""
        series = cls.__new__(cls)
        series._rows, series.packed = None, msgspec.Raw(packed)
        return series

    @property
    def rows(self) -> Sequence[wire.Series]:
        if self._rows is None:
            self._rows = wire.unpack_series(self.packed)
        return self._rows


class SeriesBlock:
    """One value for each series; a value that is not finite is missing."""

    __slots__ = ("_count", "_values", "packed", "series", "time_ns")

    def __init__(self, series: Series, values: Sequence[float], time_ns: int) -> None:
        self.series = series
        self.time_ns = time_ns
        self._values: Sequence[float] | None = values
        self._count = sum(map(math.isfinite, values))
        if self._count < len(values):
            values = [value if math.isfinite(value) else math.nan for value in values]
        self.packed = SampleBlock(series.packed, pack_values(values), time_ns)

    @classmethod
    def from_packed(cls, series: Series, values: bytes, count: int, time_ns: int) -> SeriesBlock:
        """Return a block whose values are unpacked on first use."""
        block = cls.__new__(cls)
        block.series, block.time_ns = series, time_ns
        block._values, block._count = None, count
        block.packed = SampleBlock(series.packed, values, time_ns)
        return block

    @property
    def values(self) -> Sequence[float]:
        if self._values is None:
            self._values = wire.unpack_values(self.packed.values)
        return self._values

    def __len__(self) -> int:
        return self._count

    def samples(self) -> Iterator[Sample]:
        for (name, labels), value in zip(self.series.rows, self.values, strict=True):
            if math.isfinite(value):
                yield Sample(name, labels, value, self.time_ns)


class Recurring:
    """Creates blocks that usually have the same series as the previous block."""

    def __init__(self) -> None:
        self._key: object = None
        self._series = Series([])

    def block(
        self,
        key: object,
        rows: Callable[[], Sequence[wire.Series]],
        values: Sequence[float],
        time_ns: int,
    ) -> SeriesBlock:
        """Return a block; `rows` is called only if `key` differs from the previous one."""
        if key != self._key:
            self._key, self._series = key, Series(rows())
        return SeriesBlock(self._series, values, time_ns)


def each(samples: Iterable[Sample | SeriesBlock]) -> Iterator[Sample]:
    for one in samples:
        if isinstance(one, SeriesBlock):
            yield from one.samples()
        else:
            yield one


def count(samples: Iterable[Sample | SeriesBlock]) -> int:
    return sum(len(one) if isinstance(one, SeriesBlock) else 1 for one in samples)


class PackedColumns(msgspec.Struct, array_like=True):
    """A block as it is sent to another process of this machine."""

    series: bytes  # packed; empty: the series of the previous block in this position
    values: bytes
    count: int  # number of values that are present
    time_ns: int


class ColumnWriter:
    """Packs blocks; a block with the same `Series` as the previous one is sent without it."""

    def __init__(self) -> None:
        self._previous: list[Series] = []

    def write(self, blocks: Sequence[SeriesBlock]) -> list[PackedColumns]:
        previous: list[Series | None] = [*self._previous, *[None] * len(blocks)]
        self._previous = [block.series for block in blocks]
        return [
            PackedColumns(
                b"" if block.series is series else bytes(block.series.packed),
                block.packed.values,
                len(block),
                block.time_ns,
            )
            for block, series in zip(blocks, previous, strict=False)
        ]


class ColumnReader:
    """Unpacks what a `ColumnWriter` of another process packed."""

    def __init__(self) -> None:
        self._previous: list[Series] = []

    def read(self, columns: Sequence[PackedColumns]) -> list[SeriesBlock]:
        """Return the blocks. Raises ValueError if earlier blocks were missed."""
        previous = self._previous
        self._previous = [
            Series.from_packed(column.series) if column.series else _series_at(previous, place)
            for place, column in enumerate(columns)
        ]
        return [
            SeriesBlock.from_packed(series, column.values, column.count, column.time_ns)
            for series, column in zip(self._previous, columns, strict=True)
        ]


def _series_at(previous: list[Series], place: int) -> Series:
    if place >= len(previous):
        raise ValueError(f"the series of block {place} were never sent")
    return previous[place]
