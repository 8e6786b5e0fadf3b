"""Ranks map one to one to coordinates; a shrunk topology fits the given slots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_wire.topology import DEFAULT_LAYOUT, Coordinates, Topology

sizes = st.integers(1, 6)
topologies = st.builds(Topology, sizes, sizes, sizes)
layouts = st.permutations(DEFAULT_LAYOUT).map(tuple)
small = st.integers(1, 3)
any_layout = st.builds(Topology, small, small, small, small, small, layouts)


@given(topologies)
def test_each_rank_has_its_own_coordinates(topology: Topology) -> None:
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    for rank, place in enumerate(places):
        assert topology.rank(place.dp_rank, place.pp_rank, place.tp_rank) == rank


@given(any_layout)
def test_the_layout_is_found_from_the_coordinates(topology: Topology) -> None:
    places = {rank: topology.coordinates(rank) for rank in range(topology.world_size)}
    sizes = Topology(topology.dp, topology.pp, topology.tp, topology.cp, topology.ep)
    found = sizes.arranged(places)
    assert found is not None
    assert not found.numbers
    for rank, place in places.items():
        assert found.coordinates(rank) == place
        assert found.rank_at(place) == rank


@given(any_layout, st.randoms(use_true_random=False))
def test_ranks_in_any_other_order_have_their_coordinates(topology: Topology, chance: Any) -> None:
    ranks = list(range(topology.world_size))
    chance.shuffle(ranks)
    places = {rank: topology.coordinates(at) for at, rank in enumerate(ranks)}
    found = topology.arranged(places)
    assert found is not None
    for rank, place in places.items():
        assert found.coordinates(rank) == place
        assert found.rank_at(place) == rank


def test_coordinates_that_two_ranks_claim_are_no_layout() -> None:
    places = {rank: Coordinates() for rank in range(4)}
    assert Topology(dp=4).arranged(places) is None
    assert Topology(dp=4).arranged({0: Coordinates()}) is None
    assert Topology(dp=2).arranged({0: Coordinates(), 1: Coordinates(dp_rank=2)}) is None


def test_a_row_without_a_layout_means_pp_dp_tp() -> None:
    old = msgspec.json.decode(b'{"dp": 2, "pp": 3, "tp": 2}', type=Topology)
    assert old == Topology(2, 3, 2)
    assert old.coordinates(5) == Coordinates(dp_rank=0, pp_rank=1, tp_rank=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": ("pp", "dp", "tp")},
        {"dp": 2, "numbers": (0, 0)},
        {"dp": 2, "numbers": (0,)},
    ],
)
def test_a_layout_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="once"):
        Topology(**wrong)


def test_tensor_ranks_are_adjacent_then_data_then_pipeline() -> None:
    topology = Topology(dp=2, pp=2, tp=2)
    assert [topology.coordinates(rank).tp_rank for rank in range(4)] == [0, 1, 0, 1]
    assert [topology.coordinates(rank).dp_rank for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.coordinates(rank).pp_rank for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]


@given(topologies, st.integers(0, 300))
def test_shrinking_keeps_the_model_and_fits(topology: Topology, slots: int) -> None:
    shrunk = topology.shrink(slots)
    if shrunk is None:
        assert slots < topology.tp * topology.pp
        return
    assert (shrunk.pp, shrunk.tp) == (topology.pp, topology.tp)
    assert shrunk.world_size <= slots
    assert shrunk.dp <= topology.dp
    assert shrunk.dp == topology.dp or (shrunk.dp + 1) * shrunk.tp * shrunk.pp > slots


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_an_axis_has_at_least_one_rank(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Topology(*sizes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_topology_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank must be in"):
        Topology(2, 2, 2).coordinates(rank)
