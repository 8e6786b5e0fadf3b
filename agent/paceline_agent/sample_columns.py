"""Samples as columns: names and labels cross a pipe once, values each time.

A collector brings the same series call after call. The writer tells them when they changed, the
reader remembers them.
"""

from __future__ import annotations

from array import array

import msgspec

from paceline_wire.batch import Sample


class Columns(msgspec.Struct, array_like=True):
    """`values` are doubles of this machine; `times_ns` has one entry where all are the same."""

    series: list[tuple[str, dict[str, str]]] | None  # None: those of the time before
    values: bytes
    times_ns: list[int]


class ColumnWriter:
    """Labels that were handed out are never changed in place: new ones are another dictionary."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._labels: list[dict[str, str]] = []

    def write(self, samples: list[Sample]) -> Columns:
        names = [sample.name for sample in samples]
        labels = [sample.labels for sample in samples]
        series = None
        if names != self._names or labels != self._labels:
            series = list(zip(names, labels, strict=True))
            self._names, self._labels = names, labels
        times = [sample.time_ns for sample in samples]
        if times and times.count(times[0]) == len(times):
            del times[1:]
        values = array("d", [sample.value for sample in samples])
        return Columns(series, values.tobytes(), times)


class ColumnReader:
    def __init__(self) -> None:
        self._series: list[tuple[str, dict[str, str]]] = []

    def read(self, columns: Columns) -> list[Sample]:
        """Labels are shared between the samples of a series: nobody may change them.

        Raises ValueError if columns were missed in between.
        """
        if columns.series is not None:
            self._series = columns.series
        values = array("d", columns.values)
        times = columns.times_ns if len(columns.times_ns) != 1 else columns.times_ns * len(values)
        return [
            Sample(name, labels, value, time_ns)
            for (name, labels), value, time_ns in zip(self._series, values, times, strict=True)
        ]
