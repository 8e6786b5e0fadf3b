"""Facts of all nodes, and the nodes that did not respond."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.launch import AllNodes, Ended, Reach, RemoteCommands
from paceline_cli.preflight.verdict import Check, faults

_BEGINNING = '{"node"'  # start of a node's facts in a line; a launcher may print a prefix
_SECOND_NS = 1_000_000_000
_decoder = msgspec.json.Decoder(NodeFacts)


@dataclass(slots=True)
class Survey:
    nodes: list[NodeFacts] = field(default_factory=list)
    # by node that did not respond: the reason
    complaints: dict[str, str] = field(default_factory=dict)
    # how far a node's clock is ahead of ours: (at least, at most)
    ahead_ns: dict[str, tuple[int, int]] = field(default_factory=dict)

    def checks(self) -> Iterable[Check]:
        asked: dict[str, list[str]] = {node.node: [] for node in self.nodes} | {
            node: [why] for node, why in self.complaints.items()
        }
        fix = "try the same command by hand; paceline must be installed there: --python PATH"
        yield faults("nodes answer", asked, fix, f"{len(self.nodes)} of {len(asked)}")
        if len(self.ahead_ns) > 1:
            yield self._clocks()

    def _clocks(self) -> Check:
        """Report certain clock differences only; the duration of the command is the uncertainty."""
        found: dict[str, list[str]] = {node: [] for node in self.ahead_ns}
        usual = _in_most(list(self.ahead_ns.values()))
        for node, (least, most) in self.ahead_ns.items():
            if not least <= usual <= most:
                off = max(least - usual, usual - most) / _SECOND_NS
                side = "ahead" if least > usual else "behind"
                found[node].append(f"at least {off:.1f} s {side}")
        unsure = max((most - least) / _SECOND_NS for least, most in self.ahead_ns.values())
        fix = "start chronyd or systemd-timesyncd on all nodes, with the same servers"
        return faults("clocks alike", found, fix, f"within the {unsure:.1f} s it took to ask")


def _in_most(ranges: Sequence[tuple[int, int]]) -> int:
    """Return an offset within the largest number of ranges (Marzullo's algorithm)."""
    ends = [end for each in ranges for end in each]
    return max(ends, key=lambda end: (sum(low <= end <= high for low, high in ranges), -abs(end)))


def ask(reach: Reach, there: Sequence[str], commands: RemoteCommands, seconds: float) -> Survey:
    """Collect the facts; `there`: command that prints them on a node."""
    if isinstance(reach, AllNodes):
        return _from_launcher(commands.run({"": reach.command(there)}, seconds)[""])
    ends = commands.run({node: reach.command(node, there) for node in reach.nodes}, seconds)
    survey = Survey()
    for node, end in ends.items():
        result = next(iter(parse(end.output)), None)
        if result is None:
            survey.complaints[node] = end.complaint
        else:
            _take(survey, msgspec.structs.replace(result, node=node), end)
    return survey


def _from_launcher(end: Ended) -> Survey:
    survey = Survey()
    for node_facts in parse(end.output):
        if node_facts.hostname not in {
            node.hostname for node in survey.nodes
        }:  # raised by one of several tasks
            _take(survey, node_facts, end)
    survey.nodes.sort(key=lambda node: node.node)
    if end.status != 0 or not survey.nodes:
        survey.complaints["the launcher"] = end.complaint
    return survey


def _take(survey: Survey, node_facts: NodeFacts, end: Ended) -> None:
    survey.nodes.append(node_facts)
    survey.ahead_ns[node_facts.node] = (
        node_facts.time_ns - end.ended_ns,
        node_facts.time_ns - end.started_ns,
    )


def parse(text: str) -> Iterable[NodeFacts]:
    for line in text.splitlines():
        _, beginning, rest = line.partition(_BEGINNING)
        if beginning:
            try:
                yield _decoder.decode(beginning + rest)
            except msgspec.DecodeError:
                continue


def from_files(files: Sequence[Path]) -> Survey:
    """Read facts written with `--facts`, one node per line. Raises OSError."""
    survey = Survey()
    for file in files:
        found = list(parse(file.read_text(errors="replace")))
        if not found:
            survey.complaints[str(file)] = "holds no facts: paceline preflight --facts"
        survey.nodes += found
    return survey


def forwarded(environment: Mapping[str, str], asked: Mapping[str, str]) -> list[str]:
    """Return `env NAME=VALUE ...`, which passes the job's environment through any launcher."""
    names = ("NCCL_", "GLOO_", "UCX_", "TORCH_NCCL_")
    given = {name: value for name, value in environment.items() if name.startswith(names)}
    pairs = [f"{name}={value}" for name, value in sorted({**given, **asked}.items())]
    return list(itertools.chain(["env"], pairs)) if pairs else []
