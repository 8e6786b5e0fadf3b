"""The result of one check, and the comparison that finds outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

Status = Literal["pass", "warn", "fail", "skip"]
Value = TypeVar("Value", bound=Hashable)
_NAMED_AT_MOST = 6


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check; `nodes` are at fault.

    A check that is not possible is `skip`, never `pass`.
    """

    name: str
    status: Status
    evidence: str
    fix: str | None = None
    nodes: list[str] = []


@dataclass(frozen=True, slots=True)
class Comparison(Generic[Value]):
    """Nodes compared by one value: the most common value, the outliers, and the nodes without a
    value.

    Without a majority (such as two different nodes) all are outliers, because either may be right.
    """

    usual: Value | None
    outliers: dict[str, Value]
    silent: list[str]

    @property
    def is_reported(self) -> bool:
        return self.usual is not None or bool(self.outliers)


def compare(values: Mapping[str, Value | None]) -> Comparison[Value]:
    reported = {node: value for node, value in values.items() if value is not None}
    silent = [node for node, value in values.items() if value is None]
    if not reported:
        return Comparison(None, {}, silent)
    usual, count = Counter(reported.values()).most_common(1)[0]
    if 2 * count <= len(reported) and len(reported) > 1:
        return Comparison(None, reported, silent)
    outliers = {node: value for node, value in reported.items() if value != usual}
    return Comparison(usual, outliers, silent)


def equal(
    name: str,
    values: Mapping[str, Value | None],
    fix: str,
    *,
    status: Status = "fail",
    unit: str = "",
    absent: str = "not to be had on any node",
) -> Check:
    """Check that all nodes have the same value; a missing value is a warning."""
    found = compare(values)
    if not found.is_reported:
        return Check(name=name, status="skip", evidence=absent)
    if found.outliers:
        others = "no majority" if found.usual is None else f"others {show(found.usual)}{unit}"
        evidence = (
            f"{listing([f'{n}: {show(v)}{unit}' for n, v in found.outliers.items()])}; {others}"
        )
        return Check(
            name=name, status=status, evidence=evidence, fix=fix, nodes=list(found.outliers)
        )
    evidence = f"{show(found.usual)}{unit} on {nodes_in_words(len(values) - len(found.silent))}"
    if found.silent:
        evidence += f"; not to be had on {listing(found.silent)}"
        return Check(name=name, status="warn", evidence=evidence, fix=fix, nodes=found.silent)
    return Check(name=name, status="pass", evidence=evidence)


def faults(
    name: str,
    found: Mapping[str, Sequence[str]],
    fix: str,
    passed: str,
    *,
    status: Status = "fail",
) -> Check:
    """Return a check from the problems of each node; without problems it passes."""
    wrong = {node: words for node, words in found.items() if words}
    if not wrong:
        return Check(name=name, status="pass", evidence=passed)
    alike: dict[str, list[str]] = {}
    for node, words in wrong.items():
        alike.setdefault(listing(words), []).append(node)
    evidence = listing([f"{listing(nodes)}: {words}" for words, nodes in alike.items()], "; ")
    return Check(name=name, status=status, evidence=evidence, fix=fix, nodes=list(wrong))


def skipped(name: str, why: str) -> Check:
    return Check(name=name, status="skip", evidence=why)


def show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(show(each) for each in value) or "none"
    return str(value)


def listing(words: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(words[:_NAMED_AT_MOST])
    more = len(words) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown


def nodes_in_words(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
