"""The faults the demo knows: how to name one, inject it, lift it, and judge its verdict."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline_demo.cluster import Cluster, EmulatedNode

THROTTLED_CLOCK_MHZ = 795
THROTTLED_CELSIUS = 92
THERMAL_SLOWDOWN = ("sw_thermal_slowdown", "hw_thermal_slowdown")
SLOW_DATA_SECONDS = 0.4


@dataclass(frozen=True)
class FaultKind:
    """What a fault aims at, and what the right verdict on it is."""

    target: str  # "node" or "rank"
    finding: str  # kind of the incident
    cause: str  # what its cause must contain
    fatal: bool  # the job cannot go on without a repair
    names_rank: bool = True


KINDS = {
    "throttle": FaultKind("node", "straggler", "thermal throttle", fatal=False),
    "crash": FaultKind("rank", "failure", "SIGKILL", fatal=True),
    "hang": FaultKind("rank", "hang", "stopped", fatal=True),
    "node-loss": FaultKind("node", "failure", "node lost", fatal=True, names_rank=False),
    "slow-data": FaultKind("rank", "slow_data", "data", fatal=False),
}
DEFAULT = "throttle,crash,hang"


@dataclass(frozen=True)
class Request:
    """One fault as asked for; no target: chosen by the seed when its time has come."""

    kind: str
    target: int | None


@dataclass(frozen=True)
class PlannedFault:
    """One fault about to be injected, where it will hit now."""

    kind: str
    target: int
    rank: int
    node: EmulatedNode
    local_rank: int
    pids: tuple[int, ...]

    @property
    def expected(self) -> FaultKind:
        return KINDS[self.kind]


class NotInjectableError(Exception):
    """The target is not there (any more); the message says why."""


def parse(text: str, world_size: int, node_count: int) -> list[Request]:
    """`throttle:1,crash:5,hang` to requests; `none` to an empty list.

    Raises click.BadParameter for an unknown name or a target outside the job.
    """
    requests = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind, colon, number = item.partition(":")
        if kind == "none" and not colon:
            continue
        if kind not in KINDS:
            raise click.BadParameter(f"{kind!r} is none of {', '.join(KINDS)}, none")
        limit = node_count if KINDS[kind].target == "node" else world_size
        if colon and not (number.isdecimal() and int(number) < limit):
            raise click.BadParameter(
                f"{item!r}: {KINDS[kind].target.upper()} must be a number in 0..{limit - 1}"
            )
        requests.append(Request(kind, int(number) if colon else None))
    return requests


def aim(
    request: Request, cluster: Cluster, ranks: list[dict[str, Any]], chance: random.Random
) -> PlannedFault:
    """Resolve a request against where the ranks run now."""
    by_target: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        number = int(rank["node"].removeprefix("node-"))
        key = number if KINDS[request.kind].target == "node" else rank["rank"]
        by_target.setdefault(key, []).append(rank)
    target = request.target
    if target is None:
        target = chance.choice(sorted(by_target))
    if target not in by_target:
        what = KINDS[request.kind].target
        raise NotInjectableError(
            f"{what} {target} is not in the job now; it has {what}s {sorted(by_target)}"
        )
    hit = min(by_target[target], key=lambda rank: rank["local_rank"])
    node = cluster.nodes[int(hit["node"].removeprefix("node-"))]
    if request.kind == "throttle" and node.gpus is None:
        raise NotInjectableError("without emulated GPU telemetry no GPU can be made to throttle")
    pids = tuple(rank["pid"] for rank in by_target[target] if rank["pid"])
    if not pids:
        raise NotInjectableError(f"{KINDS[request.kind].target} {target} has no running process")
    return PlannedFault(request.kind, target, hit["rank"], node, hit["local_rank"], pids)


def inject(fault: PlannedFault) -> str:
    """Do it, now; returns what was done, for people."""
    node, rank = fault.node, fault.rank
    if fault.kind == "throttle":
        assert node.gpus is not None
        node.gpus.set(
            fault.local_rank,
            sm_clock_mhz=THROTTLED_CLOCK_MHZ,
            temperature_celsius=THROTTLED_CELSIUS,
            throttle_reasons=THERMAL_SLOWDOWN,
        )
        return (
            f"GPU {fault.local_rank} of node {node.number} (rank {rank}) throttles: "
            f"{THROTTLED_CLOCK_MHZ} MHz at {THROTTLED_CELSIUS} °C"
        )
    if fault.kind == "crash":
        _signal(fault.pids[:1], signal.SIGKILL)
        return f"rank {rank} on node {node.number} is killed (SIGKILL)"
    if fault.kind == "hang":
        _signal(fault.pids[:1], signal.SIGSTOP)
        return f"rank {rank} on node {node.number} hangs (SIGSTOP)"
    if fault.kind == "node-loss":
        assert node.agent is not None
        _signal([*descendants(node.agent.pid), node.agent.pid], signal.SIGKILL)
        node.agent.wait()
        return f"node {node.number} is lost with everything on it"
    (node.directory / "faults.json").write_text(
        json.dumps(
            [
                {
                    "kind": "slow_data",
                    "local_rank": fault.local_rank,
                    "seconds": SLOW_DATA_SECONDS,
                }
            ]
        )
    )
    return f"the disk of node {node.number} slows the data of rank {rank}"


def lift(fault: PlannedFault, cluster: Cluster) -> str | None:
    """What a technician does afterwards: make the node fit for use again."""
    node = fault.node
    if fault.kind == "throttle":
        assert node.gpus is not None
        node.gpus.reset(fault.local_rank)
        return f"node {node.number} is cool again"
    if fault.kind == "slow-data":
        (node.directory / "faults.json").unlink(missing_ok=True)
        return f"the disk of node {node.number} is fast again"
    if fault.kind == "node-loss":
        cluster.start_agent(node)
        return f"node {node.number} is back"
    return None


def correct(fault: PlannedFault, verdict: dict[str, Any]) -> bool:
    """Whether the verdict names what was done: kind, rank, node and cause."""
    expected = fault.expected
    return (
        verdict["kind"] == expected.finding
        and verdict["node"] == fault.node.number
        and (verdict["rank"] == fault.rank or not expected.names_rank)
        and expected.cause.lower() in verdict["cause"].lower()
    )


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
