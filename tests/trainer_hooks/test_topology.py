"""The place of a rank, combined from the groups that frameworks create."""

from __future__ import annotations

import itertools

import pytest

from paceline.environment import axis_of
from paceline.topology import MESH, PIPELINE, USE, Fact, combine
from paceline_wire.topology import Axis, Topology

MEGATRON = "Megatron parallel state"
Dimension = tuple[Axis, int]


def groups(world_size: int, *dimensions: Dimension) -> list[dict[Axis, list[int]]]:
    """Return the group of each rank along each dimension of a mesh, outermost first."""
    sizes = [size for _, size in dimensions]
    places = list(itertools.product(*map(range, sizes)))
    assert len(places) == world_size
    found = []
    for own in places:
        by_axis: dict[Axis, list[int]] = {}
        for at, (axis, _) in enumerate(dimensions):
            by_axis[axis] = [
                rank
                for rank, place in enumerate(places)
                if place[:at] + place[at + 1 :] == own[:at] + own[at + 1 :]
            ]
        found.append(by_axis)
    return found


def arranged(all_facts: list[list[Fact]]) -> Topology:
    """Return the topology from what each rank combines, as the server does."""
    places = [combine(rank, len(all_facts), facts) for rank, facts in enumerate(all_facts)]
    known = {rank: place.coordinates for rank, place in enumerate(places) if place is not None}
    assert len({place.topology for place in places if place is not None}) == 1
    assert places[0] is not None
    topology = places[0].topology.arranged(known)
    assert topology is not None
    return topology


@pytest.mark.parametrize(
    "dimensions",
    [
        (("dp", 2), ("pp", 2), ("cp", 2), ("tp", 2)),  # picotron
        (("pp", 2), ("dp", 3), ("cp", 2), ("tp", 2)),  # Megatron
        (("pp", 2), ("dp", 4)),
        (("tp", 2), ("pp", 3)),
    ],
)
def test_a_mesh_of_any_order_gives_sizes_and_layout(dimensions: tuple[Dimension, ...]) -> None:
    world_size = 1
    for _, size in dimensions:
        world_size *= size
    of_ranks = groups(world_size, *dimensions)
    facts = [
        [Fact(axis, tuple(ranks), MESH) for axis, ranks in by_axis.items()] for by_axis in of_ranks
    ]
    topology = arranged(facts)
    assert not topology.numbers
    assert [axis for axis in topology.layout if topology.size(axis) > 1] == [
        axis for axis, _ in dimensions
    ]
    for rank, by_axis in enumerate(of_ranks):
        for axis, ranks in by_axis.items():
            assert topology.coordinates(rank).on(axis) == ranks.index(rank)


def of_mesh(shape: tuple[int, ...], dimension: int) -> list[tuple[int, ...]]:
    """Return by rank its group along one dimension."""
    places = list(itertools.product(*map(range, shape)))
    return [
        tuple(
            rank
            for rank, place in enumerate(places)
            if place[:dimension] + place[dimension + 1 :] == own[:dimension] + own[dimension + 1 :]
        )
        for own in places
    ]


def test_replicated_and_sharded_data_ranks_are_one_axis() -> None:
    shape = (2, 2, 2, 2)  # pp, dp_replicate, dp_shard, tp
    facts = [
        [
            Fact("pp", of_mesh(shape, 0)[rank], MESH),
            Fact("dp", of_mesh(shape, 1)[rank], MESH),
            Fact("dp", of_mesh(shape, 2)[rank], MESH),
            Fact("tp", of_mesh(shape, 3)[rank], MESH),
        ]
        for rank in range(16)
    ]
    topology = arranged(facts)
    assert (topology.dp, topology.pp, topology.tp) == (4, 2, 2)
    assert topology == Topology(4, 2, 2)


def test_experts_are_an_axis_inside_data_parallelism() -> None:
    data = of_mesh((1, 8), 1)  # Megatron: the dp group has all 8 ranks, ep divides it by 2
    experts = of_mesh((4, 2), 1)
    facts = [
        [Fact("dp", data[rank], MEGATRON), Fact("ep", experts[rank], MEGATRON)] for rank in range(8)
    ]
    topology = arranged(facts)
    assert (topology.dp, topology.ep) == (4, 2)
    assert topology.replicas == 8
    assert [topology.coordinates(rank).ep_rank for rank in range(4)] == [0, 1, 0, 1]


def test_context_ranks_that_fully_shard_includes_are_taken_out() -> None:
    shape = (2, 2, 2)  # dp_shard, cp, tp; parameters are sharded over dp_shard and cp
    both = of_mesh((1, 4, 2), 1)
    facts = [
        [
            Fact("dp", both[rank], MESH),
            Fact("cp", of_mesh(shape, 1)[rank], MESH),
            Fact("tp", of_mesh(shape, 2)[rank], MESH),
        ]
        for rank in range(8)
    ]
    topology = arranged(facts)
    assert (topology.dp, topology.cp, topology.tp) == (2, 2, 2)


def test_ddp_over_a_part_of_the_ranks_leaves_a_model_axis() -> None:
    across = of_mesh((2, 3), 0)
    topology = arranged([[Fact("dp", across[rank], USE)] for rank in range(6)])
    assert (topology.dp, topology.tp) == (2, 3)
    assert [topology.coordinates(rank).dp_rank for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_stages_without_a_data_group_leave_a_data_axis() -> None:
    stages = of_mesh((2, 2), 1)
    topology = arranged([[Fact("pp", stages[rank], PIPELINE)] for rank in range(4)])
    assert (topology.dp, topology.pp) == (2, 2)
    assert [topology.coordinates(rank).pp_rank for rank in range(4)] == [0, 1, 0, 1]


def test_a_default_group_of_ddp_does_not_hide_the_mesh() -> None:
    tensor = of_mesh((2, 2), 1)
    everyone = (0, 1, 2, 3)
    facts = [[Fact("dp", everyone, USE), Fact("tp", tensor[rank], MESH)] for rank in range(4)]
    topology = arranged(facts)
    assert (topology.dp, topology.tp) == (2, 2)


@pytest.mark.parametrize(
    "facts",
    [
        [],
        [Fact("tp", (0, 1, 2), MESH)],
        [Fact("pp", (0, 1, 3), PIPELINE), Fact("tp", (0, 2), MESH)],
    ],
)
def test_groups_that_do_not_fit_together_are_no_topology(facts: list[Fact]) -> None:
    assert combine(0, 4, facts) is None


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("dp", "dp"),
        ("dp_replicate", "dp"),
        ("data_parallel", "dp"),
        ("PP", "pp"),
        ("tp_mesh", "tp"),
        ("context", "cp"),
        ("ep", "ep"),
        ("stages", None),
    ],
)
def test_common_names_of_dimensions_are_known(name: str, axis: Axis | None) -> None:
    assert axis_of(name) == axis
