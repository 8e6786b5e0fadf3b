"""Samples as columns: a collector brings the same series call after call, only values change.

A block is a hundred samples for the price of a few: its series are told once to whoever is in
another process, and packed once for all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from paceline_wire import batch as wire
from paceline_wire.batch import Sample, SampleBlock, pack_series, pack_values


class Series:
    """Names and labels of the values of a block. Nobody changes the labels."""

    __slots__ = ("_rows", "packed")

    def __init__(self, rows: Sequence[wire.Series]) -> None:
        self._rows: Sequence[wire.Series] | None = rows
        self.packed = pack_series(rows)

    @classmethod
    def from_packed(cls, packed: bytes) -> Series:
        """Unpacked once somebody asks for the rows."""
        series = cls.__new__(cls)
        series._rows, series.packed = None, msgspec.Raw(packed)
        return series

    @property
    def rows(self) -> Sequence[wire.Series]:
        if self._rows is None:
            self._rows = wire.unpack_series(self.packed)
        return self._rows


class SeriesBlock:
    """A value of each of the series; one that is not finite is one that is not there."""

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
        """Unpacked once somebody asks for the values."""
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
    """Makes blocks whose series are, as a rule, those of the time before."""

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
        """`rows` is called where `key` is not equal to that of the time before."""
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
    """A block on its way to another process of this machine."""

    series: bytes  # packed; empty: those of the block in this place the time before
    values: bytes
    count: int  # of those that are there
    time_ns: int


class ColumnWriter:
    """Blocks that have the same `Series` as before are told without it."""

    def __init__(self) -> None:
        self._told: list[Series] = []

    def write(self, blocks: Sequence[SeriesBlock]) -> list[PackedColumns]:
        before: list[Series | None] = [*self._told, *[None] * len(blocks)]
        self._told = [block.series for block in blocks]
        return [
            PackedColumns(
                b"" if block.series is told else bytes(block.series.packed),
                block.packed.values,
                len(block),
                block.time_ns,
            )
            for block, told in zip(blocks, before, strict=False)
        ]


class ColumnReader:
    def __init__(self) -> None:
        self._known: list[Series] = []

    def read(self, columns: Sequence[PackedColumns]) -> list[SeriesBlock]:
        """Raises ValueError if blocks were missed in between."""
        known = self._known
        self._known = [
            Series.from_packed(told.series) if told.series else _known(known, place)
            for place, told in enumerate(columns)
        ]
        return [
            SeriesBlock.from_packed(series, told.values, told.count, told.time_ns)
            for series, told in zip(self._known, columns, strict=True)
        ]


def _known(known: list[Series], place: int) -> Series:
    if place >= len(known):
        raise ValueError(f"the series of block {place} were never told")
    return known[place]
