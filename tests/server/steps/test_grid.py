"""Ranks of any layout are found in the grid by their coordinates."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_server.steps.grid import grid_of
from paceline_server.steps.peers import peer_groups
from paceline_wire.topology import Coordinates, Topology

PICOTRON = ("ep", "dp", "pp", "cp", "tp")
SIZES = {"dp": 2, "pp": 3, "tp": 2, "cp": 2, "ep": 2}


@pytest.mark.parametrize("layout", [None, PICOTRON, ("tp", "cp", "dp", "ep", "pp")])
def test_each_rank_is_at_its_coordinates(layout) -> None:
    topology = Topology(**SIZES) if layout is None else Topology(**SIZES, layout=layout)
    grid = grid_of(topology)
    for rank in range(topology.world_size):
        place = topology.coordinates(rank)
        replica, shard = place.dp_rank * 2 + place.ep_rank, place.cp_rank * 2 + place.tp_rank
        assert (grid.stage[rank], grid.replica[rank], grid.shard[rank]) == (
            place.pp_rank,
            replica,
            shard,
        )
        assert grid.ranks[place.pp_rank, replica, shard] == rank


def test_ranks_in_no_regular_order_are_at_their_coordinates() -> None:
    places = {0: Coordinates(1, 1), 1: Coordinates(0, 1), 2: Coordinates(0, 0), 3: Coordinates(1)}
    topology = Topology(dp=2, pp=2).arranged(places)
    assert grid_of(topology).ranks[:, :, 0].tolist() == [[2, 3], [1, 0]]


def test_context_ranks_are_peers_unless_their_sequences_differ() -> None:
    grid = grid_of(Topology(dp=2, cp=2))
    ranks = np.arange(4)
    unknown, even, uneven = np.zeros(4, int), np.full(4, 512), np.array([512, 384, 512, 384])
    assert peer_groups(ranks, grid, ranks, unknown).tolist() == [0, 0, 0, 0]
    assert peer_groups(ranks, grid, ranks, even).tolist() == [0, 0, 0, 0]
    assert peer_groups(ranks, grid, ranks, uneven).tolist() == [0, 1, 0, 1]
