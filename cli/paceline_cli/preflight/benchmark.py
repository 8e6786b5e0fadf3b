"""The micro-benchmarks: planned from the facts of the nodes, run on all nodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.launch import AllNodes, Reach, RemoteCommands
from paceline_cli.preflight.plan import (
    BenchmarkPlan,
    FailedNode,
    Result,
    of_kind,
    parse,
    scale_steps,
)
from paceline_cli.preflight.traffic import address

Backend = Literal["gloo", "nccl"]
_MODULE = "paceline_cli.preflight.probe_node"
_IMPORT_SECONDS = 60.0  # import of torch from a cold shared file system
_BYTES_AT_MOST: dict[Backend, int] = {"gloo": 16 << 20, "nccl": 256 << 20}
_COMPUTE_SECONDS: dict[Backend, float] = {"gloo": 0.2, "nccl": 2.0}


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    backend: Backend | None  # None: depends on what the nodes support
    port: int | None
    rounds: int
    patience_seconds: float


def why_not(nodes: Sequence[NodeFacts]) -> str | None:
    """Return one sentence if the benchmarks cannot run, or None."""
    without = [node.node for node in nodes if "torch" not in node.versions]
    if without:
        return f"torch is not installed on {', '.join(without[:6])}: --python PATH of one with it"
    if len(nodes) > 1 and all(address(node, nodes) is None for node in nodes):
        return "no node has an address that the others could reach"
    return None


def plan(nodes: Sequence[NodeFacts], request: BenchmarkRequest) -> BenchmarkPlan:
    """Plan benchmarks with NCCL if every node has GPUs and NCCL, otherwise gloo with one process
    per node."""
    gpus = [len([gpu for gpu in node.gpus if gpu.trouble is None]) for node in nodes]
    able = all(gpus) and all("nccl" in node.versions for node in nodes)
    backend: Backend = request.backend or ("nccl" if able else "gloo")
    meetings = min(request.rounds, len(nodes)) + len(scale_steps(len(nodes))) + 3
    here = "127.0.0.1" if len(nodes) == 1 else None
    return BenchmarkPlan(
        nodes=[node.node for node in nodes],
        hostnames=[node.hostname for node in nodes],
        ranks_of_nodes=[max(1, count) for count in gpus] if backend == "nccl" else [1] * len(nodes),
        address=here or address(nodes[0], nodes) or "",
        port=request.port or nodes[0].free_port or 29_511,
        backend=backend,
        rounds=request.rounds,
        bytes_at_most=_BYTES_AT_MOST[backend],
        seconds=_COMPUTE_SECONDS[backend],
        patience_seconds=request.patience_seconds,
        deadline_seconds=_IMPORT_SECONDS + 6 * meetings * request.patience_seconds,
    )


def run_where_they_meet(
    nodes: Sequence[NodeFacts],
    request: BenchmarkRequest,
    reach: Reach,
    python: Sequence[str],
    commands: RemoteCommands,
) -> tuple[BenchmarkPlan, list[Result]]:
    """Run with the rendezvous on the first node; if no node reaches it, on the second."""
    nodes = sorted(nodes, key=lambda node: address(node, nodes) is None)  # a stable sort
    chosen = plan(nodes, request)
    results = run(chosen, reach, python, commands)
    measured = any(each.error is None for each in of_kind(results, "pair"))
    if len(nodes) < 3 or measured or address(nodes[1], nodes) is None:
        return chosen, results
    chosen = plan([*nodes[1:], nodes[0]], request)
    return chosen, run(chosen, reach, python, commands)


def run(
    chosen: BenchmarkPlan, reach: Reach, python: Sequence[str], commands: RemoteCommands
) -> list[Result]:
    """Run the plan; `python` starts Python on a node, with its environment."""
    there = [*python, "-P", "-m", _MODULE, chosen.encode()]
    if isinstance(reach, AllNodes):
        argv = {"the launcher": reach.command(there)}
    else:
        argv = {
            node: reach.command(node, [*there, str(number)])
            for number, node in enumerate(chosen.nodes)
        }
    results: list[Result] = []
    for node, end in commands.run(argv, chosen.deadline_seconds + 10).items():
        reported = list(parse(end.output))
        if end.status != 0 and not any(isinstance(each, FailedNode) for each in reported):
            reported.append(FailedNode(node=node, error=end.complaint))
        results += reported
    return results
