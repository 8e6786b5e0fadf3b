"""What each metric is: its type, unit and help, from `metrics.txt`.

One that the list does not know still gets a type, by its ending: a collector that is new must not
be mute for want of a line of prose. A test holds the collectors of this folder to the list.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources

_TYPES = {"gauge", "counter", "info", "unknown"}
_ENDINGS = {"counter": "_total", "info": "_info"}
UNLISTED = "As collected."


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `type` is OpenMetrics'; `unit` is None for a count, a state or a share."""

    name: str
    type: str
    unit: str | None
    text: str

    @property
    def family(self) -> str:
        """The name without what OpenMetrics has only on samples."""
        return self.name.removesuffix(_ENDINGS.get(self.type, ""))

    @property
    def suffix_unit(self) -> str:
        """The unit where the name ends in it, as OpenMetrics asks of a unit; else nothing."""
        return self.unit if self.unit and self.family.endswith(f"_{self.unit}") else ""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The rows by name, and in their order those that stand for several names."""

    exact: Mapping[str, Metric]
    patterns: Sequence[Metric]

    def describe(self, name: str) -> Metric:
        row = self.exact.get(name) or self._pattern(name)
        if row is None:
            return Metric(name, _type_of(name), _unit_of(name), UNLISTED)
        return Metric(name, row.type, row.unit, row.text)

    def _pattern(self, name: str) -> Metric | None:
        return next((row for row in self.patterns if fnmatchcase(name, row.name)), None)


@functools.cache
def load() -> Catalogue:
    """The catalogue of this distribution. Raises ValueError for a row that cannot be."""
    text = resources.files("paceline_agent.expose").joinpath("metrics.txt").read_text()
    return parse(text)


def parse(text: str) -> Catalogue:
    exact: dict[str, Metric] = {}
    patterns: list[Metric] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        row = _row(line)
        if "*" in row.name:
            patterns.append(row)
        elif row.name in exact:
            raise ValueError(f"{row.name} is listed twice")
        else:
            exact[row.name] = row
    return Catalogue(exact, patterns)


def _row(line: str) -> Metric:
    columns = line.split(None, 3)
    if len(columns) != 4 or columns[1] not in _TYPES:
        raise ValueError(f"expected NAME TYPE UNIT HELP, got {line!r}")
    name, kind, unit, text = columns
    if not name.endswith(_ENDINGS.get(kind, "")):
        raise ValueError(f"the name of a {kind} ends in {_ENDINGS[kind]}, got {name}")
    return Metric(name, kind, None if unit == "-" else unit, text)


def _type_of(name: str) -> str:
    return next((kind for kind, ending in _ENDINGS.items() if name.endswith(ending)), "unknown")


def _unit_of(name: str) -> str | None:
    stem = name.removesuffix("_total")
    units = ("seconds", "bytes", "celsius", "watts", "ratio")
    return next((unit for unit in units if stem.endswith(f"_{unit}")), None)
