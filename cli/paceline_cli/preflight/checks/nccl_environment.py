"""Checks of the `NCCL_*` variables: equal on all nodes, and naming existing devices.

Syntax of NCCL_SOCKET_IFNAME and NCCL_IB_HCA: NCCL's documentation, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline_cli.preflight.checks.fabric import ACTIVE
from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.traffic import matches
from paceline_cli.preflight.verdict import Check, equal, faults, skipped

_SOCKET, _HCA, _IB_DISABLE = "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE"
_BRIDGES = ("docker", "virbr", "br-", "cni", "flannel")


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    settings = {
        node.node: tuple(f"{n}={v}" for n, v in sorted(node.environment.items())) for node in nodes
    }
    fix = "give all nodes the same environment"
    yield equal("environment", settings, fix, status="warn")
    yield _socket(nodes)
    yield _hca(nodes)
    yield _disabled(nodes)


def _socket(nodes: Sequence[NodeFacts]) -> Check:
    found = {node.node: _socket_wrong(node, alone=len(nodes) == 1) for node in nodes}
    fix = f"{_SOCKET}=NAME of the interface that reaches the other nodes; `^docker,lo` leaves out"
    asked = sorted({node.environment.get(_SOCKET, "") for node in nodes})
    passed = f"{_SOCKET}={', '.join(asked)}" if any(asked) else f"{_SOCKET} is not needed"
    check = faults(_SOCKET, found, fix, passed)
    unset = not any(asked)
    # without the variable NCCL selects an interface, usually the right one
    if unset and check.status == "fail":
        return Check(
            name=check.name, status="warn", evidence=check.evidence, fix=fix, nodes=check.nodes
        )
    return check


def _socket_wrong(node: NodeFacts, alone: bool) -> list[str]:
    asked = node.environment.get(_SOCKET)
    up = [each for each in node.interfaces if each.up and each.addresses]
    if not asked:
        choices = [each.name for each in up if not each.name.startswith(("lo", *_BRIDGES))]
        several = len(choices) > 1 and not alone
        return [f"not set, and any of {', '.join(choices)} may be taken"] if several else []
    chosen = [each.name for each in up if matches(asked, each.name)]
    if not chosen:
        return [f"{asked!r} names no interface that is up"]
    if alone:
        return []
    return [
        f"{name} reaches no other node" for name in chosen if name.startswith(("lo", *_BRIDGES))
    ]


def _hca(nodes: Sequence[NodeFacts]) -> Check:
    asked = [node for node in nodes if node.environment.get(_HCA)]
    if not asked:
        return skipped(_HCA, "not set: NCCL takes all active ports")
    found: dict[str, list[str]] = {}
    for node in asked:
        setting = node.environment[_HCA]
        chosen = [port for port in node.rdma_ports if matches(setting, port.device, port.port)]
        down = [f"{port.name} is not active" for port in chosen if port.state != ACTIVE]
        found[node.node] = down if chosen else [f"{setting!r} names no device"]
    fix = f"{_HCA}=mlx5_0,mlx5_1 ...: the ports that are cabled; a leading = wants exact names"
    return faults(_HCA, found, fix, "names active ports on all nodes")


def _disabled(nodes: Sequence[NodeFacts]) -> Check:
    found = {
        node.node: [f"{_IB_DISABLE}=1, while RDMA ports are active"]
        if node.environment.get(_IB_DISABLE) == "1"
        and any(port.state == ACTIVE for port in node.rdma_ports)
        else []
        for node in nodes
    }
    return faults(_IB_DISABLE, found, f"unset {_IB_DISABLE}", "RDMA is not switched off")
