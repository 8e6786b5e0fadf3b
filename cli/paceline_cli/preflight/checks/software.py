"""Checks of versions: those that must be equal on all nodes, and those that should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.verdict import Check, Status, equal

_GPU_NODE = "install the same driver on all nodes, and reboot or reload it"
_ENVIRONMENT = "start all nodes from the same image or environment"

# name in NodeFacts.versions: (status when it differs, fix). All ranks need the same NCCL protocol;
# a different kernel is only suspicious.
_VERSIONS: dict[str, tuple[Status, str]] = {
    "driver": ("fail", _GPU_NODE),
    "cuda driver": ("fail", _GPU_NODE),
    "nccl": ("fail", _ENVIRONMENT),
    "torch": ("fail", _ENVIRONMENT),
    "python": ("warn", _ENVIRONMENT),
    "paceline": ("warn", _ENVIRONMENT),
    "kernel": ("warn", "boot the same kernel on all nodes"),
    "mlx5_core": ("warn", "install the same OFED on all nodes"),
    "gdrdrv": ("warn", "install the same gdrcopy on all nodes"),
}


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    for name, (status, fix) in _VERSIONS.items():
        values = {node.node: node.versions.get(name) for node in nodes}
        yield equal(f"version of {name}", values, fix, status=status)
