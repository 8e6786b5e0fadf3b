"""Which rank runs on which node.

Ranks lie in contiguous blocks in rank order, so that tensor peers share a node. When a node is
replaced, the others keep their ranks (and with them warm page caches and local files).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from paceline_server.decide.types import NodeView, RankView
from paceline_wire.topology import Topology


class Placement(msgspec.Struct, frozen=True):
    topology: Topology
    ranks: list[RankView]


def place(
    asked: Topology,
    nodes: Sequence[NodeView],
    previous: Sequence[RankView] = (),
    *,
    may_shrink: bool = True,
) -> Placement | None:
    """Seat the ranks on `nodes`, all of which must be usable; None: not even a smaller job fits.

    `previous` is the generation before, whose seats are kept where that is possible.
    """
    slots = sum(node.slots for node in nodes)
    topology = asked.shrink(slots) if may_shrink else asked
    if topology is None or topology.world_size > slots:
        return None
    if len(previous) == topology.world_size:
        homes = _replace_missing(nodes, previous)
    else:
        homes = _in_blocks(topology.world_size, nodes, previous)
    return Placement(topology, _seat(homes, {node.agent_id: node for node in nodes}))


def natural(agent_id: str) -> list[tuple[int, str]]:
    """Sort key by which node-2 comes before node-10."""
    return [
        (int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", agent_id)
    ]


def _replace_missing(nodes: Sequence[NodeView], previous: Sequence[RankView]) -> list[str]:
    """Agent of each rank: as before, except that the ranks of missing nodes move together."""
    free = {node.agent_id: node.slots for node in nodes}
    homes: dict[int, str] = {}
    for rank in previous:
        if free.get(rank.agent_id, 0) > 0:
            free[rank.agent_id] -= 1
            homes[rank.rank] = rank.agent_id
    homeless = [rank for rank in sorted(previous, key=_rank) if rank.rank not in homes]
    for agent_id in dict.fromkeys(rank.agent_id for rank in homeless):
        block = [rank.rank for rank in homeless if rank.agent_id == agent_id]
        while block:
            home = _home(len(block), free)
            moved, block = block[: free[home]], block[free[home] :]
            homes |= dict.fromkeys(moved, home)
            free[home] -= len(moved)
    return [homes[rank] for rank in range(len(previous))]


def _home(count: int, free: dict[str, int]) -> str:
    """The node that takes a whole block of `count` ranks, else the one with the most room."""
    whole = [agent_id for agent_id, slots in free.items() if slots >= count]
    return min(whole, key=natural) if whole else max(free, key=lambda agent_id: free[agent_id])


def _in_blocks(
    world_size: int, nodes: Sequence[NodeView], previous: Sequence[RankView]
) -> list[str]:
    """Agent of each rank, node after node; nodes of the generation before come first."""
    first_rank = {rank.agent_id: rank.rank for rank in sorted(previous, key=_rank, reverse=True)}
    order = sorted(
        nodes,
        key=lambda node: (
            first_rank.get(node.agent_id, world_size + len(previous)),
            natural(node.agent_id),
        ),
    )
    return [node.agent_id for node in order for _ in range(node.slots)][:world_size]


def _seat(homes: Iterable[str], nodes: dict[str, NodeView]) -> list[RankView]:
    taken: Counter[str] = Counter()
    ranks = []
    for rank, agent_id in enumerate(homes):
        local_rank = taken[agent_id]
        taken[agent_id] += 1
        gpus = nodes[agent_id].gpus
        gpu = gpus[local_rank] if local_rank < len(gpus) else None
        ranks.append(RankView(rank=rank, agent_id=agent_id, local_rank=local_rank, gpu=gpu))
    return ranks


def _rank(rank: RankView) -> int:
    return rank.rank
