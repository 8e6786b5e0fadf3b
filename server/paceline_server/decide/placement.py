"""Assign ranks to nodes.

Ranks lie in contiguous blocks in rank order, so that tensor-parallel peers share a node. When a
node is replaced, the others keep their ranks, and so their warm page caches and local files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from paceline_server.decide.types import NodeView, RankView
from paceline_wire.topology import Topology


class RankLayout(msgspec.Struct, frozen=True):
    """The topology of a generation and the node and GPU of each rank."""

    topology: Topology
    ranks: list[RankView]


def place(
    asked: Topology,
    nodes: Sequence[NodeView],
    previous: Sequence[RankView] = (),
    *,
    may_shrink: bool = True,
) -> RankLayout | None:
    """Assign the ranks to `nodes`.

    Args:
        asked: the topology requested for the job.
        nodes: candidates; all of them are usable.
        previous: ranks of the generation before; they keep their nodes where possible.
        may_shrink: allow fewer data-parallel replicas than requested.

    Returns:
        None if the job does not fit.
    """
    slots = sum(node.slots for node in nodes)
    topology = asked.shrink(slots) if may_shrink else asked
    if topology is None or topology.world_size > slots:
        return None
    if len(previous) == topology.world_size:
        assigned = _replace_missing(nodes, previous)
    else:
        assigned = _in_blocks(topology.world_size, nodes, previous)
    return RankLayout(topology, _assign(assigned, {node.agent_id: node for node in nodes}))


def natural(agent_id: str) -> list[tuple[int, str]]:
    """Return a natural sort key: node-2 comes before node-10."""
    return [
        (int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", agent_id)
    ]


def _replace_missing(nodes: Sequence[NodeView], previous: Sequence[RankView]) -> list[str]:
    """Return the agent of each rank; the ranks of a missing node move together."""
    free = {node.agent_id: node.slots for node in nodes}
    assigned: dict[int, str] = {}
    for rank in previous:
        if free.get(rank.agent_id, 0) > 0:
            free[rank.agent_id] -= 1
            assigned[rank.rank] = rank.agent_id
    unassigned = [rank for rank in sorted(previous, key=_rank) if rank.rank not in assigned]
    for agent_id in dict.fromkeys(rank.agent_id for rank in unassigned):
        block = [rank.rank for rank in unassigned if rank.agent_id == agent_id]
        while block:
            target = _target_node(len(block), free)
            moved, block = block[: free[target]], block[free[target] :]
            assigned |= dict.fromkeys(moved, target)
            free[target] -= len(moved)
    return [assigned[rank] for rank in range(len(previous))]


def _target_node(count: int, free: dict[str, int]) -> str:
    """Return a node with `count` free slots, else the one with the most."""
    whole = [agent_id for agent_id, slots in free.items() if slots >= count]
    return min(whole, key=natural) if whole else max(free, key=lambda agent_id: free[agent_id])


def _in_blocks(
    world_size: int, nodes: Sequence[NodeView], previous: Sequence[RankView]
) -> list[str]:
    """Return the agent of each rank, node by node; nodes of the previous generation come first."""
    first_rank = {rank.agent_id: rank.rank for rank in sorted(previous, key=_rank, reverse=True)}
    order = sorted(
        nodes,
        key=lambda node: (
            first_rank.get(node.agent_id, world_size + len(previous)),
            natural(node.agent_id),
        ),
    )
    return [node.agent_id for node in order for _ in range(node.slots)][:world_size]


def _assign(agent_ids: Iterable[str], nodes: dict[str, NodeView]) -> list[RankView]:
    used: Counter[str] = Counter()
    ranks = []
    for rank, agent_id in enumerate(agent_ids):
        local_rank = used[agent_id]
        used[agent_id] += 1
        gpus = nodes[agent_id].gpus
        gpu = gpus[local_rank] if local_rank < len(gpus) else None
        ranks.append(RankView(rank=rank, agent_id=agent_id, local_rank=local_rank, gpu=gpu))
    return ranks


def _rank(rank: RankView) -> int:
    return rank.rank
