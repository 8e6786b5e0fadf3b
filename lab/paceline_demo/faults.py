"""The demo's faults: parse them, inject them, remove them, and check the verdict."""

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
    """The target of a fault and the correct verdict on it."""

    target: str  # "node" or "rank"
    finding: str  # expected kind of the incident
    cause: str  # text that the cause must contain
    fatal: bool  # training stops until the repair
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
class FaultRequest:
    """A fault that the user requested; without a target, the seed selects one at injection."""

    kind: str
    target: int | None


@dataclass(frozen=True)
class PlannedFault:
    """A fault with the rank, node and processes that it hits."""

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
    """The fault cannot be injected now; the message has the reason."""


def parse(text: str, world_size: int, node_count: int) -> list[FaultRequest]:
    """Return the requests in a list such as `throttle:1,crash:5,hang`; none for `none`.

    Raises:
        click.BadParameter: an unknown name, or a target outside the job.
    """
    requests = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind, colon, number = item.partition(":")
        if kind == "none" and not colon:
            continue
        if kind not in KINDS:
            raise click.BadParameter(f"unknown fault {kind!r}; expected {', '.join(KINDS)} or none")
        limit = node_count if KINDS[kind].target == "node" else world_size
        if colon and not (number.isdecimal() and int(number) < limit):
            raise click.BadParameter(
                f"{item!r}: {KINDS[kind].target.upper()} must be a number from 0 to {limit - 1}"
            )
        requests.append(FaultRequest(kind, int(number) if colon else None))
    return requests


def aim(
    request: FaultRequest, cluster: Cluster, ranks: list[dict[str, Any]], chance: random.Random
) -> PlannedFault:
    """Return the fault with its target among the ranks as they are placed now.

    Raises:
        NotInjectableError: the job has no such rank or node, or the node has nothing to inject the
        fault into.
    """
    by_target: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        number = int(rank["node"].removeprefix("node-"))
        key = number if KINDS[request.kind].target == "node" else rank["rank"]
        by_target.setdefault(key, []).append(rank)
    target = request.target
    if target is None:
        target = chance.choice(sorted(by_target))
    if target not in by_target:
        noun = KINDS[request.kind].target
        raise NotInjectableError(
            f"{noun} {target} is not in the job now; its {noun}s are {sorted(by_target)}"
        )
    hit = min(by_target[target], key=lambda rank: rank["local_rank"])
    node = cluster.nodes[int(hit["node"].removeprefix("node-"))]
    if request.kind == "throttle" and node.gpus is None:
        raise NotInjectableError("throttling needs emulated GPUs, and there are none")
    pids = tuple(rank["pid"] for rank in by_target[target] if rank["pid"])
    if not pids:
        raise NotInjectableError(f"{KINDS[request.kind].target} {target} has no running process")
    return PlannedFault(request.kind, target, hit["rank"], node, hit["local_rank"], pids)


def inject(fault: PlannedFault) -> str:
    """Inject the fault. Return a sentence for the user."""
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
            f"GPU {fault.local_rank} of node-{node.number} (rank {rank}) is throttled to "
            f"{THROTTLED_CLOCK_MHZ} MHz at {THROTTLED_CELSIUS} °C"
        )
    if fault.kind == "crash":
        _signal(fault.pids[:1], signal.SIGKILL)
        return f"rank {rank} (node-{node.number}) is killed (SIGKILL)"
    if fault.kind == "hang":
        _signal(fault.pids[:1], signal.SIGSTOP)
        return f"rank {rank} (node-{node.number}) is stopped (SIGSTOP)"
    if fault.kind == "node-loss":
        lose_node(node)
        return f"node-{node.number} is lost: its agent and ranks are killed"
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
    return (
        f"the data loader of rank {rank} (node-{node.number}) takes {SLOW_DATA_SECONDS:g} s longer "
        "per step"
    )


def remove(fault: PlannedFault, cluster: Cluster) -> str | None:
    """Repair the node as a technician would. Return a sentence; None if it needs no repair."""
    node = fault.node
    if fault.kind == "throttle":
        assert node.gpus is not None
        node.gpus.reset(fault.local_rank)
        return f"node-{node.number} runs at full clock again"
    if fault.kind == "slow-data":
        (node.directory / "faults.json").unlink(missing_ok=True)
        return f"node-{node.number} loads data at full speed again"
    if fault.kind == "node-loss":
        cluster.start_agent(node)
        return f"node-{node.number} is online again"
    return None


def correct(fault: PlannedFault, verdict: dict[str, Any]) -> bool:
    """Return whether the verdict has the right kind, rank, node and cause."""
    expected = fault.expected
    return (
        verdict["kind"] == expected.finding
        and verdict["node"] == fault.node.number
        and (verdict["rank"] == fault.rank or not expected.names_rank)
        and expected.cause.lower() in verdict["cause"].lower()
    )


def lose_node(node: EmulatedNode) -> None:
    """Kill the agent of a node and everything that it has started."""
    assert node.agent is not None
    _signal([*descendants(node.agent.pid), node.agent.pid], signal.SIGKILL)
    node.agent.wait()


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all children, their children, and so on."""
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
