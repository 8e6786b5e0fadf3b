"""Which rank holds the copies of which: one on another node, in another failure domain if it can.

Nodes are in the order of their domains, and each node's ranks send to the node that is as many
places further as the largest domain has nodes. So a copy leaves its domain, unless more than half
of all nodes are in one; and each rank holds the copies of one other, if all nodes have as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class RankHost(NamedTuple):
    """Where a rank runs."""

    domain: str  # what fails together, such as a switch or a rack; empty: unknown
    node: str


def holders_of(hosts: Sequence[RankHost]) -> list[int | None]:
    """Return for each rank the one that holds its copies; None: there is no other node.

    Example:
        >>> holders_of([RankHost("", "a"), RankHost("", "a"), RankHost("", "b"), RankHost("", "b")])
        [2, 3, 0, 1]
    """
    ranks: dict[RankHost, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    nodes = sorted(ranks)
    if len(nodes) < 2:
        return [None] * len(hosts)
    shift = max(Counter(node.domain for node in nodes).values()) % len(nodes) or 1
    holders: list[int | None] = [None] * len(hosts)
    for position, node in enumerate(nodes):
        others = ranks[nodes[(position + shift) % len(nodes)]]
        for place, rank in enumerate(ranks[node]):
            holders[rank] = others[place % len(others)]
    return holders
