"""Copies leave their node and, if they can, their failure domain; ranks share the load."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.checkpoints.memory.holders import RankHost, holders_of


def hosts(nodes: dict[str, str], ranks_per_node: int = 2) -> list[RankHost]:
    return [RankHost(domain, node) for node, domain in nodes.items() for _ in range(ranks_per_node)]


def test_one_node_has_no_holder() -> None:
    assert holders_of(hosts({"a": ""}, 3)) == [None, None, None]


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_each_rank_holds_the_copies_of_one_rank_of_another_node(nodes: int) -> None:
    ranks = hosts({f"node{number}": "" for number in range(nodes)}, 4)
    holders = holders_of(ranks)
    assert Counter(holders) == Counter(range(len(ranks)))
    for rank, holder in enumerate(holders):
        assert holder is not None
        assert ranks[holder].node != ranks[rank].node


def test_copies_leave_their_failure_domain() -> None:
    ranks = hosts({"a": "rack1", "b": "rack2", "c": "rack1", "d": "rack2", "e": "rack3"})
    for rank, holder in enumerate(holders_of(ranks)):
        assert holder is not None
        assert ranks[holder].domain != ranks[rank].domain


def test_nodes_with_fewer_ranks_hold_more_copies_each() -> None:
    ranks = [RankHost("", "a"), RankHost("", "b"), RankHost("", "b"), RankHost("", "b")]
    assert holders_of(ranks) == [1, 0, 0, 0]
