"""A pipeline that idles more than its schedule requires."""

import dataclasses

import msgspec
import pytest
from simulated_finding import straggler
from simulated_job import SimulatedJob
from simulated_step import START_NS, SimulatedStep, gpipe, one_forward_one_backward
from watched import Watched

from paceline_server.detect.bubble.detector import BubbleDetector
from paceline_server.detect.bubble.settings import BubbleSettings
from paceline_server.detect.host_load import WAIT
from paceline_server.policy import Policy
from paceline_server.steps.schedule import bubble_theory
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology


def test_theoretical_bubble_of_each_schedule():
    assert bubble_theory({"schedule": "gpipe", "microbatches": "8"}, 2) == pytest.approx(1 / 9)
    assert bubble_theory({"schedule": "1f1b", "microbatches": "8"}, 4) == pytest.approx(3 / 11)
    interleaved = {"schedule": "interleaved", "microbatches": "8", "virtual_stages": "2"}
    assert bubble_theory(interleaved, 4) == pytest.approx(3 / 19)
    assert bubble_theory({}, 1) == 0
    for unknown in ({}, {"schedule": "gpipe"}, {"schedule": "mine", "microbatches": "8"}):
        assert bubble_theory(unknown, 2) is None
    assert bubble_theory({"schedule": "gpipe", "microbatches": "-8"}, 2) is None


@pytest.mark.parametrize("stages", [2, 4])
def test_measured_is_theory_for_equal_stages(stages):
    job = SimulatedJob(Topology(1, stages, 1), jitter=0.0)
    summary = job.advance(3)[-1].steps[0]
    assert [bubble.stage for bubble in summary.bubbles] == list(range(stages))
    for bubble in summary.bubbles:
        assert bubble.theory_ratio == pytest.approx((stages - 1) / (8 + stages - 1))
        assert bubble.measured_ratio == pytest.approx(bubble.theory_ratio, abs=0.01)


def a_job(schedule=one_forward_one_backward, **changes):
    return SimulatedStep(Topology(2, 4, 1), schedule(4, 8), jitter=0.03, **changes)


def shown(job, steps=30, **seen):
    watched = Watched(BubbleDetector, job.topology, metadata={"schedule": "1f1b"})
    for name, value in seen.items():
        setattr(watched, name, value)
    watched.show(job.play(step) for step in range(steps))
    return watched.findings


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("slow transfers between stages", {"transfer_seconds": 0.015}),
        ("late launches", {"pauses": dict.fromkeys(range(8), 0.04)}),
    ],
)
def test_a_lasting_excess_is_reported_with_its_cause(cause, changes):
    [found] = shown(a_job(**changes))
    assert (found.kind, found.cause) == ("bubble", cause)
    assert "costs" in found.summary
    assert "zero-bubble" in found.advice


def show_waits(watched, share):
    """Report that each rank waits for a CPU for this share of the time."""
    for rank in range(8):
        labels, node = {"job": "job", "rank": str(rank)}, watched.generation.node(rank)
        for second in range(0, 300, 5):
            sample = Sample(WAIT, labels, share * second, START_NS + second * 10**9)
            watched.telemetry.add(node, sample)


def test_idle_time_of_ranks_that_wait_for_a_cpu_is_not_blamed_on_transfers():
    job = a_job(transfer_seconds=0.015)
    watched = Watched(BubbleDetector, job.topology, metadata={"schedule": "1f1b"})
    show_waits(watched, share=0.3)
    [found] = watched.show(job.play(step) for step in range(30))
    assert (found.cause, found.severity) == ("CPU contention", "info")
    assert found.speedup is None, "the CPUs work for other ranks meanwhile"
    assert "gives" not in found.summary
    assert found.advice.startswith("Give the ranks more CPUs.")
    assert "zero-bubble" not in found.advice


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_young_job_is_judged_once_it_is_known_whether_its_cpus_are_busy(is_measured):
    job = a_job(transfer_seconds=0.015)
    watched = Watched(BubbleDetector, job.topology)
    settings = BubbleSettings(host_load_seconds=345.0)  # a step begins each 10 s
    watched.detector = BubbleDetector(watched.generation, Policy(), settings)
    if is_measured:
        show_waits(watched, share=0.0)
    [found] = watched.show(job.play(step) for step in range(60))
    assert (found.step < 30) if is_measured else (found.step == 35)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_what_other_detectors_report_is_not_reported_twice(schedule):
    assert shown(a_job(schedule, stage_cost={3: 1.6})) == []
    slow_link = msgspec.structs.replace(straggler(), kind="slow_link")
    assert shown(a_job(schedule, transfer_seconds=0.02), active=[slow_link]) == []
    assert shown(a_job(schedule, slow={2: 2.0}), stragglers=frozenset({2})) == []


@pytest.mark.parametrize("seed", range(3))
def test_jitter_is_no_finding(seed):
    job = dataclasses.replace(a_job(transfer_seconds=0.0005), jitter=0.15)
    watched = Watched(BubbleDetector, job.topology)
    watched.show(job.play(step, seed) for step in range(60))
    assert watched.findings == []


def test_a_bubble_is_cleared_when_it_is_over():
    watched = Watched(BubbleDetector, Topology(2, 4, 1))
    slow = a_job(transfer_seconds=0.015)
    watched.show(slow.play(step) for step in range(30))
    watched.show(a_job().play(step) for step in range(30, 60))
    assert [found.cleared for found in watched.findings] == [False, True]
