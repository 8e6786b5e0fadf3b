"""Ranks map one to one to coordinates; a shrunk topology fits the given slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_wire.topology import Topology

topologies = st.builds(Topology, st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))


@given(topologies)
def test_each_rank_has_its_own_coordinates(topology: Topology) -> None:
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    for rank, place in enumerate(places):
        assert topology.rank(place.dp_rank, place.pp_rank, place.tp_rank) == rank


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
