"""Pipeline stages with different durations."""

import dataclasses

import pytest
from simulated_step import SimulatedStep, gpipe, interleaved, one_forward_one_backward
from watched import Watched

from paceline_server.detect.stage_imbalance.detector import StageImbalanceDetector
from paceline_wire.topology import Topology


def a_job(topology, order=None, **changes):
    order = order or one_forward_one_backward(topology.pp, 8)
    return SimulatedStep(topology, order, transfer_seconds=0.0003, jitter=0.03, **changes)


def played(job, steps, first=0, seed=0, **changes):
    return [dataclasses.replace(job, **changes).play(first + step, seed) for step in range(steps)]


def phase_seconds(job, **changes):
    return float(dataclasses.replace(job, jitter=0.0, **changes).play().ranks.step_seconds[0])


@pytest.mark.parametrize("topology", [Topology(2, 4, 2), Topology(1, 4, 1)])
@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_an_uneven_model_is_advice_with_the_layers_to_move(topology, schedule):
    """With 8 + 8 + 8 + 12 layers, moving one to each other stage makes them equal."""
    cost = {3: 12 / 8}
    job = a_job(topology, schedule(4, 8), stage_cost=cost)
    watched = Watched(
        StageImbalanceDetector, topology, metadata={"stage_layers": "8,8,8,12"}, ranks_per_node=4
    )
    watched.show(played(job, 30))
    [found] = watched.findings
    assert (found.kind, found.stage, found.severity) == ("stage_imbalance", 3, "info")
    assert found.persistence == "chronic"
    assert "oving 3 of stage 3's 12 layers to stages 0, 1 and 2" in found.advice
    even = dict.fromkeys(range(4), 9 / 8)
    gained = phase_seconds(job) / phase_seconds(job, stage_cost=even)
    assert found.speedup == pytest.approx(gained, rel=0.03)
    assert 1 / (1 - found.cost_ratio) == pytest.approx(gained, rel=0.03)


def test_layers_of_virtual_stages_are_moved():
    """The last part has four more layers.

    Moving one of them is the best possible with whole layers.
    """
    job = a_job(Topology(2, 2, 1), interleaved(2, 8, 2), stage_cost={1: 6 / 4})
    metadata = {"stage_layers": "4,4,4,8"}
    watched = Watched(StageImbalanceDetector, job.topology, metadata=metadata, ranks_per_node=1)
    watched.show(played(job, 30))
    [found] = watched.findings
    assert found.stage == 1
    assert "of stage 1's 12 layers to stage 0" in found.advice


def test_without_known_layers_the_share_of_compute_is_reported():
    job = a_job(Topology(2, 4, 1), stage_cost={2: 1.4})
    watched = Watched(StageImbalanceDetector, job.topology, ranks_per_node=1)
    watched.show(played(job, 30))
    [found] = watched.findings
    assert found.stage == 2
    assert "Stage 2 has 32% of the compute" in found.advice


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_on_the_last_stage_is_no_finding(seed):
    job = a_job(Topology(2, 4, 1), stage_cost={3: 1.04})
    watched = Watched(StageImbalanceDetector, job.topology, ranks_per_node=1)
    watched.show(played(job, 80, seed=seed))
    assert watched.findings == []


def test_a_slow_rank_is_not_its_stage():
    job = a_job(Topology(4, 2, 1))
    watched = Watched(StageImbalanceDetector, job.topology, ranks_per_node=1)
    watched.show(played(job, 30))
    watched.show(played(job, 40, 30, slow={5: 1.6}))
    assert watched.findings == []


@pytest.mark.parametrize("topology", [Topology(1, 4, 1), Topology(4, 2, 1)])
def test_a_stage_that_becomes_slow_later_is_no_property_of_the_model(topology):
    job = a_job(topology)
    watched = Watched(StageImbalanceDetector, topology)
    watched.show(played(job, 30))
    watched.show(played(job, 30, 30, stage_cost={1: 1.5}))
    assert watched.findings == []


def test_a_straggler_explains_its_stage():
    job = a_job(Topology(1, 4, 1), stage_cost={1: 1.5})
    watched = Watched(StageImbalanceDetector, job.topology)
    watched.stragglers = frozenset({1})
    watched.show(played(job, 30))
    assert watched.findings == []


def test_an_imbalance_is_cleared_when_the_stages_are_even_again():
    job = a_job(Topology(2, 4, 1), stage_cost={3: 1.5})
    watched = Watched(StageImbalanceDetector, job.topology)
    watched.show(played(job, 20))
    watched.show(played(job, 40, 20, stage_cost={}))
    assert [found.cleared for found in watched.findings] == [False, True]
