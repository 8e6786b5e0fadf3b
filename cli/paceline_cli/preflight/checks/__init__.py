"""Checks over the facts of all nodes, one file per topic. They are pure and read nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline_cli.preflight.checks import affinity, fabric, gpus, host, nccl_environment, software
from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.verdict import Check

Family = Callable[[Sequence[NodeFacts]], Iterable[Check]]
FAMILIES: tuple[Family, ...] = (
    software.checks,
    gpus.checks,
    affinity.checks,
    fabric.checks,
    nccl_environment.checks,
    host.checks,
)


def all_checks(nodes: Sequence[NodeFacts]) -> list[Check]:
    return [check for family in FAMILIES for check in family(nodes)]
