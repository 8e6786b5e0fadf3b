"""Ranks are placed in blocks, keep their nodes if possible, and never exceed a node's slots."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline_server.decide.placement import RankLayout, place
from paceline_server.decide.types import NodeView
from paceline_wire.topology import Topology

ASKED = Topology(2, 2, 2)


def node(index: int, slots: int = 2, gpus: int | None = None) -> NodeView:
    return NodeView(
        agent_id=f"node-{index}",
        address=f"10.0.0.{index}",
        rendezvous_port=29500,
        slots=slots,
        gpus=list(range(slots if gpus is None else gpus)),
        last_seen_ns=0,
        boot_id="boot",
    )


def homes(placement: RankLayout | None) -> list[int]:
    assert placement is not None
    return [int(rank.agent_id.removeprefix("node-")) for rank in placement.ranks]


def test_nodes_are_filled_in_natural_order() -> None:
    assert homes(place(ASKED, [node(10), node(9), node(2), node(1)])) == [1, 1, 2, 2, 9, 9, 10, 10]


def test_a_spare_takes_the_ranks_of_a_missing_node() -> None:
    before = place(ASKED, [node(index) for index in range(4)])
    assert before is not None
    after = place(ASKED, [node(0), node(2), node(3), node(4)], before.ranks)
    assert homes(after) == [0, 0, 4, 4, 2, 2, 3, 3]


def test_a_block_is_kept_together_if_one_node_can_hold_it() -> None:
    before = place(ASKED, [node(index) for index in range(4)])
    assert before is not None
    spares = [node(4, slots=1), node(5, slots=1), node(6)]
    assert homes(place(ASKED, [node(0), node(2), node(3), *spares], before.ranks))[2:4] == [6, 6]
    assert homes(place(ASKED, [node(0), node(2), node(3), *spares[:2]], before.ranks))[2:4] == [
        4,
        5,
    ]


def test_too_few_slots_shrink_dp_and_nothing_else() -> None:
    placement = place(ASKED, [node(index) for index in range(3)])
    assert placement is not None
    assert placement.topology == Topology(1, 2, 2)
    assert homes(placement) == [0, 0, 1, 1]
    assert place(ASKED, [node(0)]) is None
    assert place(ASKED, [node(index) for index in range(3)], may_shrink=False) is None


def test_a_rank_beyond_the_gpus_has_none() -> None:
    placement = place(Topology(2, 1, 1), [node(0, slots=2, gpus=1)])
    assert placement is not None
    assert [rank.gpu for rank in placement.ranks] == [0, None]


SLOTS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@given(SLOTS, st.sets(st.integers(0, 7)), SLOTS)
def test_any_placement_respects_slots_and_moves_no_rank_without_need(
    slots: list[int], gone: set[int], spares: list[int]
) -> None:
    nodes = [node(index, count) for index, count in enumerate(slots)]
    before = place(ASKED, nodes)
    kept = [one for index, one in enumerate(nodes) if index not in gone]
    usable = [*kept, *(node(20 + index, count) for index, count in enumerate(spares))]
    after = place(ASKED, usable, before.ranks if before else [])
    if after is None:
        assert sum(one.slots for one in usable) < 4
        return
    used = Counter(rank.agent_id for rank in after.ranks)
    assert all(used[one.agent_id] <= one.slots for one in usable)
    assert used.keys() <= {one.agent_id for one in usable}
    assert [rank.rank for rank in after.ranks] == list(range(after.topology.world_size))
    seats = {(rank.agent_id, rank.local_rank) for rank in after.ranks}
    assert len(seats) == after.topology.world_size
    if before is not None and before.topology == after.topology:
        staying = {one.agent_id for one in kept}
        for old, new in zip(before.ranks, after.ranks, strict=True):
            assert old.agent_id not in staying or new.agent_id == old.agent_id
