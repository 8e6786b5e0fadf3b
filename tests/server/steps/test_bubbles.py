"""Idle time in a pipeline phase, and its causes."""

import dataclasses

import numpy as np
import pytest
from simulated_step import SimulatedStep, gpipe, interleaved, one_forward_one_backward

from paceline_server.steps.bubbles import BubbleModel
from paceline_server.steps.pipeline import Pipeline, PipelineAction
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

METADATA: dict[str, str] = {}
SHARES = ("imbalance", "straggler", "variation", "transfer", "data", "launch", "other")


def measured(job, step=0, seed=0):
    return BubbleModel(job.topology).measure(job.play(step, seed), METADATA)


def shares(bubble):
    return {name: getattr(bubble, f"{name}_ratio") for name in SHARES}


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 3), (8, 16)])
@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_equal_stages_idle_as_in_theory(schedule, stages, microbatches):
    job = SimulatedStep(Topology(2, stages, 2), schedule(stages, microbatches), jitter=0.0)
    bubbles = measured(job)
    assert [one.stage for one in bubbles] == list(range(stages))
    for one in bubbles:
        assert one.theory_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1))
        assert one.measured_ratio == pytest.approx(one.theory_ratio, abs=1e-6)


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (2, 8, 3)]
)
def test_interleaving_divides_the_bubble(stages, microbatches, chunks):
    job = SimulatedStep(Topology(1, stages, 1), interleaved(stages, microbatches, chunks))
    for one in measured(job):
        assert one.theory_ratio == pytest.approx(
            (stages - 1) / (chunks * microbatches + stages - 1)
        )
        assert one.measured_ratio == pytest.approx(one.theory_ratio, abs=1e-6)


def test_an_unknown_schedule_has_the_theory_of_its_own_order():
    """Weight gradients fill the idle time of 1F1B (zero-bubble H1 with two stages)."""
    f, b, w = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT
    first = [
        PipelineAction(f, 0),
        PipelineAction(f, 1),
        PipelineAction(b, 0),
        PipelineAction(w, 0),
        PipelineAction(b, 1),
        PipelineAction(w, 1),
    ]
    last = [
        PipelineAction(f, 0),
        PipelineAction(b, 0),
        PipelineAction(f, 1),
        PipelineAction(b, 1),
        PipelineAction(w, 0),
        PipelineAction(w, 1),
    ]
    job = SimulatedStep(Topology(1, 2, 1), [first, last], 0.02, 0.02)
    for one in measured(job):
        assert one.theory_ratio == pytest.approx(1 - 6 / 7)
        assert one.measured_ratio == pytest.approx(one.theory_ratio, abs=1e-6)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_short_transfers_count_as_work(schedule):
    job = SimulatedStep(Topology(2, 4, 1), schedule(4, 8), transfer_seconds=0.0004)
    for one in measured(job):
        assert one.measured_ratio == pytest.approx(one.theory_ratio, abs=0.01)


CAUSES = [
    ("imbalance", {"stage_cost": {3: 1.5}}),
    ("straggler", {"slow": {1: 2.0}}),
    ("transfer", {"links": {(0, 1): 0.015}}),
    ("data", {"late_data": {1: 0.3}}),
    ("launch", {"pauses": dict.fromkeys(range(4), 0.01)}),
    ("launch", {"pauses": dict.fromkeys(range(4, 8), 0.01), "receives_late": True}),
    ("variation", {"jitter": 0.3}),
]
CAUSE_NAMES = [",".join([cause, *change]) for cause, change in CAUSES]


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("cause", "change"), CAUSES, ids=CAUSE_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_excess_is_attributed_to_what_was_changed(schedule, cause, change, seed):
    job = SimulatedStep(
        Topology(4, 4, 1), schedule(4, 8), **{"transfer_seconds": 0.0003, "jitter": 0.02, **change}
    )
    if cause == "data":
        # a rank of the second stage, because the first stage starts the phase
        job.late_data = {4: 0.3}
    bubbles = measured(job, seed=seed)
    idlest = max(bubbles, key=lambda one: one.measured_ratio)
    found = shares(idlest)
    assert idlest.excess_ratio > 0.02
    assert max(found, key=found.get) == cause, found
    assert found[cause] > 0.6 * idlest.excess_ratio
    for one in bubbles:
        assert sum(shares(one).values()) == pytest.approx(one.excess_ratio, abs=1e-9)
        assert abs(one.other_ratio) < 0.05 * one.measured_ratio


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_bubbles_are_measured_even_if_the_nodes_clocks_disagree(schedule):
    job = SimulatedStep(Topology(2, 4, 1), schedule(4, 8), transfer_seconds=0.0003, jitter=0.02)
    straight = measured(job)
    skewed = measured(dataclasses.replace(job, skew_ns={1: 5_000_000, 2: -5_000_000, 3: 3_000_000}))
    for one, other in zip(straight, skewed, strict=True):
        assert one.measured_ratio == pytest.approx(other.measured_ratio, abs=0.002)
        assert abs(other.other_ratio) < 0.05 * other.measured_ratio


def test_replicas_whose_spans_were_lost_are_left_out():
    job = SimulatedStep(Topology(3, 2, 1), one_forward_one_backward(2, 8))
    timing = job.play()
    kept = np.ones(timing.compute.rank.size, dtype=np.bool_)
    kept[np.flatnonzero(timing.compute.rank == 1)[3]] = False
    columns = {name: getattr(timing.compute, name)[kept] for name in timing.compute.__slots__}
    timing = dataclasses.replace(timing, compute=type(timing.compute)(**columns))
    for one in BubbleModel(job.topology).measure(timing, METADATA):
        assert one.measured_ratio == pytest.approx(1 / 9)


def test_without_microbatches_nothing_is_explained():
    job = SimulatedStep(Topology(1, 2, 1), gpipe(2, 8))
    timing = job.play()
    unknown = np.full_like(timing.compute.microbatch, -1)
    compute = dataclasses.replace(timing.compute, microbatch=unknown)
    metadata = {"schedule": "gpipe", "microbatches": "8"}
    found = BubbleModel(job.topology).measure(
        dataclasses.replace(timing, compute=compute), metadata
    )
    assert [one.measured_ratio for one in found] == pytest.approx([1 / 9, 1 / 9])
    assert {one.theory_ratio for one in found} == {1 / 9}
    assert {one.excess_ratio for one in found} == {None}


def test_an_impossible_order_is_refused():
    with pytest.raises(ValueError, match="circle"):
        Pipeline(
            [
                [PipelineAction(Op.BACKWARD, 0), PipelineAction(Op.FORWARD, 0)],
                [PipelineAction(Op.FORWARD, 0), PipelineAction(Op.BACKWARD, 0)],
            ]
        )
    with pytest.raises(ValueError, match="does not exist"):
        Pipeline([[PipelineAction(Op.FORWARD, 0)], [PipelineAction(Op.FORWARD, 1)]])


def test_a_slow_replica_is_a_straggler_not_an_uneven_stage():
    job = SimulatedStep(
        Topology(2, 2, 2), gpipe(2, 8), transfer_seconds=0.0003, jitter=0.02, slow={2: 2.5}
    )
    idlest = max(measured(job, seed=1), key=lambda one: one.measured_ratio)
    found = shares(idlest)
    assert max(found, key=found.get) == "straggler", found
