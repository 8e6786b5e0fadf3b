"""What one check says, and how the odd ones are told from the others."""

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
    """`nodes` are those at fault. A check that could not be made is `skip`, never `pass`."""

    name: str
    status: Status
    evidence: str
    fix: str | None = None
    nodes: list[str] = []


@dataclass(frozen=True, slots=True)
class Comparison(Generic[Value]):
    """What most nodes have, who has something else, and who does not say.

    Without a majority (two nodes that differ) all are odd, for nobody knows which one is right.
    """

    usual: Value | None
    odd: dict[str, Value]
    silent: list[str]

    @property
    def told(self) -> bool:
        return self.usual is not None or bool(self.odd)


def compare(values: Mapping[str, Value | None]) -> Comparison[Value]:
    told = {node: value for node, value in values.items() if value is not None}
    silent = [node for node, value in values.items() if value is None]
    if not told:
        return Comparison(None, {}, silent)
    usual, count = Counter(told.values()).most_common(1)[0]
    if 2 * count <= len(told) and len(told) > 1:
        return Comparison(None, told, silent)
    odd = {node: value for node, value in told.items() if value != usual}
    return Comparison(usual, odd, silent)


def equal(
    name: str,
    values: Mapping[str, Value | None],
    fix: str,
    *,
    status: Status = "fail",
    unit: str = "",
    absent: str = "not to be had on any node",
) -> Check:
    """The same on all nodes; a node that does not say while others do is a warning."""
    found = compare(values)
    if not found.told:
        return Check(name=name, status="skip", evidence=absent)
    if found.odd:
        others = "no majority" if found.usual is None else f"others {show(found.usual)}{unit}"
        evidence = f"{listing([f'{n}: {show(v)}{unit}' for n, v in found.odd.items()])}; {others}"
        return Check(name=name, status=status, evidence=evidence, fix=fix, nodes=list(found.odd))
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
    """`found`: what is wrong by node, nothing where all is well."""
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
