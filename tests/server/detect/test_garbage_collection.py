"""Garbage collections of one rank that all others wait for."""

import dataclasses

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.garbage_collection.detector import GcDetector
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(4, 2, 1), one_forward_one_backward(2, 8), jitter=0.03)


def played(pauses_of, steps=60):
    """Play a job; `pauses_of(step)` returns the pause of each rank in seconds."""
    return [dataclasses.replace(JOB, gc=pauses_of(step)).play(step) for step in range(steps)]


@pytest.mark.parametrize("seed", range(3))
def test_pauses_in_different_steps_lead_to_advice(seed):
    random = np.random.default_rng(seed)
    watched = Watched(GcDetector, JOB.topology)

    def now_and_then(_):
        return {rank: 0.15 for rank in range(8) if random.random() < 0.15}

    watched.show(played(now_and_then, 100))
    first, found = watched.findings[0], watched.findings[-1]
    assert first.step <= 8
    assert len({one.fingerprint for one in watched.findings}) == 1
    assert (found.kind, found.severity, found.rank) == ("gc", "info", None)
    assert "gc.freeze" in found.advice
    # In 1 - 0.85^8 = 73% of the steps at least one rank pauses; if all paused together, in 15%.
    usual = 0.55
    expected = (0.73 - 0.15) * 0.15 / (usual + 0.73 * 0.15)
    assert found.cost_ratio == pytest.approx(expected, rel=0.25)
    assert first.cost_ratio == pytest.approx(expected, rel=0.75)


def test_pauses_that_start_late_are_reported_within_five_steps():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {step % 8: 0.15} if step >= 40 else {}))
    assert [(one.onset_step, one.step) for one in watched.findings[:1]] == [(40, 42)]


def test_garbage_of_the_start_is_not_reported():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {step % 8: 0.3} if step < 2 else {}))
    assert watched.findings == []


def test_pauses_since_the_first_step_are_reported_at_the_third():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {step % 8: 0.15}, 10))
    assert watched.findings[0].step == 2


def test_a_long_first_pause_does_not_count():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {step % 8: 0.15 if step else 0.6}, 10))
    assert watched.findings[0].step == 3


def test_pauses_in_the_same_step_are_healthy():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: dict.fromkeys(range(8), 0.3) if step % 10 == 0 else {}))
    assert watched.findings == []


def test_common_pauses_that_take_a_tenth_of_the_time_are_reported():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: dict.fromkeys(range(8), 0.1) if step >= 20 else {}, 100))
    found = watched.findings[0]
    assert (found.rank, found.onset_step) == (None, 20)
    assert found.step <= 25
    assert found.cost_ratio == pytest.approx(0.1 / 0.65, rel=0.35)  # a typical step takes 0.55 s
    assert "same steps" in found.summary
    assert "less often" in found.advice
    assert watched.findings[-1].cost_ratio == pytest.approx(0.1 / 0.65, rel=0.1)


def test_a_single_rank_with_long_pauses_is_named():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {5: 0.1} if step % 2 else {}))
    [found] = watched.findings
    assert found.rank == 5


@pytest.mark.parametrize("other", [0.0, 0.002])
def test_the_pauses_of_one_of_two_ranks_cost_all_of_their_time(other):
    job = SimulatedStep(Topology(2, 1, 1), one_forward_one_backward(1, 4), jitter=0.03)
    watched = Watched(GcDetector, job.topology)
    pauses = {0: other, 1: 0.5}
    watched.show([dataclasses.replace(job, gc=pauses).play(step) for step in range(60)])
    found = watched.findings[-1]
    assert found.rank == 1
    usual = float(np.median(job.play(0).ranks.step_seconds))
    assert found.cost_ratio == pytest.approx(0.5 / (usual + 0.5), rel=0.1)


def test_short_pauses_are_healthy():
    random = np.random.default_rng(1)
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda _: {rank: 0.005 for rank in range(8) if random.random() < 0.2}, 150))
    assert watched.findings == []


def test_the_finding_is_cleared():
    watched = Watched(GcDetector, JOB.topology)
    watched.show(played(lambda step: {step % 8: 0.1} if step < 40 else {}, 180))
    assert [found.cleared for found in watched.findings] == [False, False, True]  # corrected once


def test_pauses_that_are_more_than_the_window_apart_are_one_finding():
    """Steps of 4 ms: the 48 newest are a fifth of a second, and three of each 100 pause."""
    quick = SimulatedStep(
        Topology(2, 1, 1),
        one_forward_one_backward(1, 1),
        forward_seconds=0.001,
        backward_seconds=0.002,
        after_seconds=0.001,
    )
    watched = Watched(GcDetector, quick.topology, step_seconds=0.004)
    for step in range(2_000):
        pauses = {step % 2: 0.01} if step % 100 < 5 else {}
        watched.show([dataclasses.replace(quick, gc=pauses).play(step)])
    assert len({found.fingerprint for found in watched.findings}) == 1
    assert not any(found.cleared for found in watched.findings)


@pytest.mark.parametrize(("pause", "is_reported"), [(0.02, False), (0.1, True)])
def test_a_rank_without_others_is_advised_to_collect_less(pause, is_reported):
    job = SimulatedStep(Topology(1, 1, 1), one_forward_one_backward(1, 4), jitter=0.03)
    watched = Watched(GcDetector, job.topology)
    usual = float(np.median(job.play(0).ranks.step_seconds))
    gc = {0: usual * pause / (1 - pause) * 1.5}
    watched.show([dataclasses.replace(job, gc=gc).play(step) for step in range(60)])
    assert bool(watched.findings) == is_reported
    if is_reported:
        found = watched.findings[-1]
        assert found.rank == 0
        assert found.summary.startswith("Rank 0 (node-0) collects garbage")
        assert "wait" not in found.summary
        assert "less often" in found.advice
        assert found.cost_ratio == pytest.approx(pause * 1.5, rel=0.1)
