"""Topologies that ranks report after they began."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_job import JOB, SimulatedJob

from paceline_server.engine.reported_topology import ReportedTopology, may_replace, topology_of
from paceline_wire.batch import RankDefined
from paceline_wire.ring import RankDescription
from paceline_wire.topology import Coordinates, Topology


def described(sizes: Topology, place: Coordinates, **metadata: str) -> RankDescription:
    return RankDescription(
        source="DeviceMesh", topology=sizes, coordinates=place, metadata=metadata
    )


def test_a_topology_counts_once_all_ranks_report_the_same() -> None:
    reported = ReportedTopology(4)
    plain, mesh = Topology(dp=4), Topology(dp=2, pp=2)
    for rank in range(4):
        reported.add_description(rank, described(plain, Coordinates(dp_rank=rank)))
    assert reported.take() == plain
    assert reported.take() is None
    for rank in range(3):
        reported.add_description(rank, described(mesh, Coordinates(rank % 2, rank // 2)))
        assert reported.take() is None
    reported.add_description(3, described(mesh, Coordinates(1, 1)))
    assert reported.take() == mesh


def test_coordinates_count_more_than_sizes_that_do_not_fit_them() -> None:
    places = {rank: Coordinates(dp_rank=rank // 2, pp_rank=rank % 2) for rank in range(4)}
    found = topology_of(Topology(dp=4), places)
    assert found is not None
    assert (found.dp, found.pp) == (2, 2)
    assert [found.coordinates(rank) for rank in range(4)] == list(places.values())


@pytest.mark.parametrize(
    ("current", "reported", "answer"),
    [
        (Topology(dp=8), Topology(2, 2, 2), True),
        (Topology(dp=8), Topology(2, 2, 1), False),
        (Topology(2, 2, 2), Topology(2, 4, 1), False),
        (Topology(2, 2, 2), Topology(2, 2, 2, layout=("ep", "cp", "dp", "pp", "tp")), True),
    ],
)
def test_a_request_of_more_than_data_parallelism_stands(
    current: Topology, reported: Topology, answer: bool
) -> None:
    assert may_replace(current, reported) is answer


def describe_all(job: SimulatedJob, sizes: Topology, places: list[Coordinates]) -> None:
    for rank in job.ranks:
        event: Any = RankDefined(
            time_ns=job.now_ns,
            job=JOB,
            generation=0,
            rank=rank,
            definitions=[],
            descriptions=[described(sizes, places[rank], schedule="1f1b")],
        )
        job.engine.feed(job.batch(job.node(rank), events=[event]), job.now_ns)


def test_the_engine_adopts_the_stages_that_ranks_recognize() -> None:
    job = SimulatedJob(Topology(2, 2, 2))
    places = [job.topology.coordinates(rank) for rank in job.ranks]
    before = job.placement()
    assert [bubble.stage for bubble in job.advance(2)[-1].steps[-1].bubbles] == [0, 1]
    plain = SimulatedJob(Topology(dp=8))
    plain.topology = job.topology  # it runs two stages, and was started without saying so
    describe_all(plain, Topology(2, 2, 2), places)
    outcome = plain.advance(2)[-1]
    assert outcome.placement is not None
    assert outcome.placement.topology == before.topology
    assert outcome.placement.topology_source == "DeviceMesh"
    assert [bubble.stage for bubble in outcome.steps[-1].bubbles] == [0, 1]
