"""Synthetic jobs behave like pipelines, and reach the engine as intended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline_evaluation.conditions import QUIET, Conditions, Noise
from paceline_evaluation.emission import Emission
from paceline_evaluation.faults import (
    CHRONIC,
    COUNTED_MAGNITUDE,
    KINDS,
    HiddenTraffic,
    TrialFault,
    TrialPlan,
)
from paceline_evaluation.plans import draw_plan, step_seconds
from paceline_evaluation.program import EXTRA, build
from paceline_evaluation.shape import JobShape, draw_shape
from paceline_evaluation.timeline import Timeline, play
from paceline_evaluation.trial import Length, Trial, draw_steps
from paceline_server.engine.types import Outcome
from paceline_server.steps.types import StepSummary
from paceline_wire.batch import Batch
from paceline_wire.spans import Op, from_columns, unpack
from paceline_wire.topology import Topology

SHAPE = JobShape(
    topology=Topology(dp=2, pp=4, tp=1),
    schedule="1f1b",
    virtual=1,
    microbatches=8,
    ranks_per_node=2,
    layer_seconds=0.005,
    backward_ratio=2.0,
    stage_layers=(2, 2, 2, 2),
    head_seconds=0.0,
    near_transfer_seconds=1e-6,
    far_transfer_seconds=1e-6,
    tensor_collective_seconds=0.0,
    reduction_seconds=1e-6,
    optimizer_seconds=1e-6,
    data_seconds=1e-6,
    checkpoint_every=0,
    checkpoint_seconds=0.0,
    zero=False,
    lengths=None,
)
SHAPES = [
    SHAPE,
    replace(SHAPE, schedule="gpipe"),
    replace(SHAPE, schedule="interleaved", virtual=2, stage_layers=(1,) * 8),
    replace(SHAPE, topology=Topology(dp=2, pp=2, tp=2), stage_layers=(2, 2), zero=True),
]


def theory(shape: JobShape) -> float:
    stages = shape.topology.pp
    return (stages - 1) / (shape.virtual * shape.microbatches + stages - 1)


class Watched(Trial):
    """A trial that records its batches and steps."""

    def __init__(self, plan: TrialPlan, steps: int, noise: Noise, seed: int = 0) -> None:
        super().__init__("none", plan, steps, np.random.default_rng(seed), noise)
        self.outcomes: list[Outcome] = []
        self.sent: list[Batch] = []
        tick, feed = self.engine.tick, self.engine.feed

        def kept_tick(now_ns: int) -> Outcome:
            self.outcomes.append(tick(now_ns))
            return self.outcomes[-1]

        def kept_feed(batch: Batch, received_ns: int) -> None:
            self.sent.append(batch)
            feed(batch, received_ns)

        self.engine.tick, self.engine.feed = kept_tick, kept_feed  # type: ignore[method-assign]

    @property
    def steps(self) -> list[StepSummary]:
        return [step for outcome in self.outcomes for step in outcome.steps]


def played(shape: JobShape, *faults: TrialFault) -> tuple[Conditions, Timeline]:
    program = build(shape)
    conditions = Conditions(shape, program, QUIET, np.random.default_rng(0), faults)
    durations = conditions.draw(0, 3)
    return conditions, play(shape, program, durations, np.zeros(conditions.grid))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.text)
def test_a_healthy_step_takes_the_time_of_its_schedule(shape: JobShape):
    busy = 3 * 0.010 * shape.microbatches  # forward and backward of two layers per rank
    assert step_seconds(shape) == pytest.approx(busy / (1 - theory(shape)), rel=0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.text)
def test_the_engine_measures_the_theoretical_bubble_and_the_injected_self_time(shape: JobShape):
    slow = TrialFault("slow_rank", 3, 0.5, ranks=(1,), factor=1.5)
    trial = Watched(TrialPlan(shape, (slow,)), 6, QUIET)
    trial.run()
    assert [step.step for step in trial.steps] == list(range(6))
    busy = 3 * 0.010 * shape.microbatches
    for rank in trial.steps[2].ranks:
        assert rank.self_seconds == pytest.approx(busy, rel=0.01)
    for bubble in trial.steps[2].bubbles:
        assert bubble.measured_ratio == pytest.approx(theory(shape), abs=0.005)
        assert bubble.theory_ratio == pytest.approx(theory(shape))
    slowed = {rank.rank: rank.self_seconds for rank in trial.steps[5].ranks}
    assert slowed.pop(1) == pytest.approx(1.5 * busy, rel=0.01)
    assert max(slowed.values()) == pytest.approx(busy, rel=0.01)


def test_every_receive_ends_with_its_send_and_their_numbers_agree():
    shape = SHAPES[2]
    trial = Watched(TrialPlan(shape), 2, QUIET)
    trial.run()
    sends, receives = {}, {}
    for batch in trial.sent:
        for block in batch.spans:
            for span in unpack(from_columns(block.columns)):
                if span.op in (Op.FORWARD_SEND, Op.BACKWARD_SEND):
                    sends[block.rank, span.peer, span.sequence] = span.end_ns
                elif span.op in (Op.FORWARD_RECV, Op.BACKWARD_RECV):
                    receives[span.peer, block.rank, span.sequence] = span.end_ns
    assert len(receives) == 2 * 2 * 2 * 7 * 8  # steps, dp, directions, cuts, microbatches
    assert sends.keys() == receives.keys()
    assert all(abs(sends[key] - receives[key]) <= 1 for key in sends)


def test_sequence_numbers_continue_from_step_to_step():
    trial = Watched(TrialPlan(SHAPES[3]), 4, QUIET)
    trial.run()
    numbers: dict[tuple[int, int], list[int]] = {}
    for batch in trial.sent:
        for block in batch.spans:
            for span in unpack(from_columns(block.columns)):
                if span.group:
                    numbers.setdefault((block.rank, span.group), []).append(span.sequence)
    assert len(numbers) == 8 * 3
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())


def test_clocks_differ_by_at_most_five_milliseconds_and_drift_little():
    shape = replace(SHAPE, topology=Topology(16, 4, 1))
    emission = Emission(shape, build(shape), np.random.default_rng(1), lost=0.0)
    offsets = np.array([emission.offset_ns(rank, 0.0) for rank in range(64)])
    later = np.array([emission.offset_ns(rank, 600.0) for rank in range(64)])
    assert 5e6 < np.ptp(offsets) <= 10e6
    assert (offsets[::2] == offsets[1::2]).all()  # two ranks of a node share its clock
    assert 0 < np.abs(later - offsets).max() < 1e6


def test_an_overrun_ring_reports_how_many_spans_it_lost():
    trial = Watched(TrialPlan(SHAPE), 30, Noise())
    trial.emission.lost = 0.1
    trial.run()
    blocks = [block for batch in trial.sent for block in batch.spans]
    torn = [block for block in blocks if block.lost]
    assert torn
    whole: dict[int, set[int]] = {}
    for block in blocks:
        whole.setdefault(block.rank, set()).add(block.count + block.lost)
    # a GC pause counts as one
    assert all(max(counts) - min(counts) <= 1 for counts in whole.values())
    assert len(trial.steps) == 30


def test_faults_cost_what_they_are_tuned_to():
    chance = np.random.default_rng(3)
    for kind in KINDS:
        plan = draw_plan(kind, chance, 20, largest=16)
        if kind in CHRONIC:
            assert [fault.onset_step for fault in plan.faults] == [0]
        if kind in ("slow_link", "data_stall", "stalled_microbatch"):
            slow = step_seconds(plan.shape, plan.faults, steps=16)
            cost = slow / step_seconds(plan.shape, steps=16) - 1.0
            assert cost == pytest.approx(plan.faults[0].magnitude, rel=0.35)
        if kind not in ("none", "slow_rank"):
            assert all(fault.counts for fault in plan.faults)
            assert all(fault.magnitude >= COUNTED_MAGNITUDE for fault in plan.faults)


@pytest.mark.parametrize("kind", ["slow_link", "gc", "stalled_microbatch"])
def test_faults_cost_as_much_in_other_steps_than_they_were_tuned_to(kind: str):
    for seed in range(13, 20):
        plan = draw_plan(kind, np.random.default_rng((7, seed)), 20, largest=32)
        healthy, slow = (step_seconds(plan.shape, one, steps=80) for one in ((), plan.faults))
        assert slow / healthy - 1.0 == pytest.approx(plan.faults[0].magnitude, rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fault_begins_within_the_steps_of_any_job_size(kind: str):
    chance = np.random.default_rng(0)
    for world_size in (8, 256, 512, 1024):
        for onset in (40, 159):
            steps = draw_steps(kind, chance, onset, Length(), world_size)
            assert kind in CHRONIC or kind == "none" or steps >= onset + 16
            assert steps <= (500 if world_size <= 256 else 180)


def test_a_creep_grows_linearly_and_counts_from_10_percent():
    fault = TrialFault("slow_creep", 10, 0.3, ranks=(1,), factor=1.3, ramp_steps=60)
    assert fault.share(np.array([9, 10, 39, 69, 90])).tolist() == pytest.approx(
        [0.0, 1 / 60, 0.5, 1.0, 1.0]
    )
    assert fault.counted_step == 29  # the 20th of the 60 steps
    assert replace(fault, ramp_steps=0).counted_step == 10


def test_a_late_reduction_begins_on_time_and_its_fault_slows_one_group():
    shape = SHAPES[3]  # dp 2, pp 2, tp 2
    fault = TrialFault(
        "late_link", 6, 0.2, ranks=(4, 6), stage=1, factor=1000.0, traffic=HiddenTraffic(3, 2)
    )
    trial = Watched(TrialPlan(shape, (fault,)), 9, QUIET)
    trial.run()
    lengths: dict[int, dict[int, list[int]]] = {}
    for batch in trial.sent:
        for block in batch.spans:
            for span in unpack(from_columns(block.columns)):
                if span.group == EXTRA:
                    lengths.setdefault(span.step, {}).setdefault(block.rank, []).append(
                        span.duration_ns
                    )
    assert sorted(lengths) == [3, 5, 7]
    assert all(sorted(of_step) == list(range(8)) for of_step in lengths.values())
    assert min(lengths[7][4] + lengths[7][6]) > 100 * max(lengths[5][4] + lengths[5][6])
    assert len(trial.steps) == 9


def test_all_other_ranks_wait_for_a_hung_rank():
    fault = TrialFault("hang", 3, 1.0, ranks=(5,), node=2)
    trial = Watched(TrialPlan(SHAPES[3], (fault,)), 3, Noise())
    trial.record.faults = (fault,)
    trial.run()
    assert [seen.finding.rank for seen in trial.record.findings if seen.finding.kind == "hang"] == [
        5
    ]


def test_drawn_shapes_are_valid_jobs():
    chance = np.random.default_rng(5)
    for _ in range(100):
        shape = draw_shape(chance)
        assert shape.world_size == shape.topology.world_size <= 1024
        assert len(shape.stage_layers) == shape.topology.pp * shape.virtual
        if shape.schedule == "interleaved":
            assert shape.microbatches % shape.topology.pp == 0
        if shape.lengths is not None:
            tokens, squares = shape.lengths.draw(chance, (200,))
            factors = shape.lengths.factor(tokens, squares)
            assert factors.max() / factors.min() <= 4.5
            assert factors.mean() == pytest.approx(1.0, abs=0.12)
