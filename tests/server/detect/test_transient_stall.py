"""A short stall is reported once it is over; stalls that a job always has are not."""

import pytest
from timed_run import FORWARD_SECONDS, Noise, TimedRun, subjects

from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_server.detect.transient_stall.detector import TransientStallDetector
from paceline_server.detect.transient_stall.settings import TransientStallSettings
from paceline_wire.topology import Topology

DEMO = Topology(2, 2, 2)
STEP_SECONDS = 1.25 * 24 * FORWARD_SECONDS


def watched(topology: Topology, seed: int, **settings: object) -> TimedRun:
    return TimedRun(topology, seed, **settings).watch(StragglerDetector, TransientStallDetector)


@pytest.mark.parametrize("lengths", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_stall_is_reported_when_it_is_over(steps, lengths):
    run = watched(DEMO, 3, lengths=lengths, noise=Noise(outliers=0.0))
    run.advance(40)
    run.stalled = {5: 0.5 * STEP_SECONDS}
    assert run.advance(steps) == []
    run.stalled = {}
    [found] = run.advance(20)
    assert subjects([found]) == [("transient_stall", 5, "node-2")]
    assert found.onset_step == 40
    assert (found.severity, found.persistence) == ("info", "transient")
    assert not found.suspects_node


@pytest.mark.parametrize(
    ("notable", "text", "has_advice"),
    [(100.0, "before again. No action is needed.", False), (0.0, "before again.", True)],
)
def test_a_long_stall_comes_with_advice(notable, text, has_advice):
    run = watched(DEMO, 3, noise=Noise(outliers=0.0))
    settings = TransientStallSettings(notable_seconds=notable)
    run._detectors = [TransientStallDetector(run.generation, run.policy, settings)]
    run.advance(40)
    run.stalled = {5: 0.5 * STEP_SECONDS}
    run.advance(1)
    run.stalled = {}
    [found] = run.advance(20)
    assert found.summary.endswith(text)
    assert (found.advice is not None) == has_advice


def test_a_rank_that_is_slow_again_after_one_step_is_not_as_fast_as_before():
    """The first step after a rollout hides it: there all ranks take longer."""
    run = watched(DEMO, 3, noise=Noise(outliers=0.0))
    run.advance(40)
    for step in range(40, 100):
        run.stalled = {5: 0.5 * STEP_SECONDS} if step % 4 != 3 else {}
        run.advance(1)
    assert {one.rank for one in run.findings} == {5}
    assert {one.kind for one in run.findings} == {"straggler"}


def test_a_stall_as_short_as_a_busy_host_makes_them_is_not_reported():
    run = watched(DEMO, 3, noise=Noise(outliers=0.0))
    settings = TransientStallSettings(least_seconds=0.6 * STEP_SECONDS)
    run._detectors = [TransientStallDetector(run.generation, run.policy, settings)]
    run.advance(40)
    for share, reports in ((0.4, 0), (0.8, 1)):
        run.stalled = {5: share * STEP_SECONDS}
        run.advance(1)
        run.stalled = {}
        assert len(run.advance(20)) == reports


def test_a_stall_of_all_microbatches_is_a_transient_stall():
    run = watched(DEMO, 4)
    run.advance(40)
    run.slow = {2: 3.0}
    run.advance(2)
    run.slow = {}
    assert subjects(run.advance(20)) == [("transient_stall", 2, "node-1")]


def test_a_stall_of_less_than_two_seconds_is_one_finding_with_all_its_steps():
    """Rank 5 is slow for 12 steps of 20 ms. In one of them rank 0 stalls much longer; another one
    takes all ranks longer."""
    run = TimedRun(DEMO, 4, step_ns=20_000_000).watch(TransientStallDetector)
    run.advance(40)
    for step in range(12):
        run.stalled = {5: 0.5 * STEP_SECONDS, **({0: 2.0 * STEP_SECONDS} if step == 4 else {})}
        run.longer = 3.0 * STEP_SECONDS if step == 8 else 0.0
        run.advance(1)
    run.stalled = {}
    run.advance(20)
    found = [one for one in run.findings if one.rank == 5]
    assert [one.kind for one in found] == ["transient_stall"]
    assert "in steps 40-51" in found[0].summary


def test_a_stall_that_lasts_is_only_a_straggler():
    run = watched(DEMO, 5)
    run.advance(40)
    run.slow = {2: 2.5}
    assert subjects(run.advance(30)) == [("straggler", 2, "node-1")]
    run.slow = {}
    assert subjects(run.advance(30)) == [("straggler", 2, "node-1")]  # the stall is cleared


def test_a_stall_after_which_the_rank_stays_slow_is_only_a_straggler():
    run = watched(DEMO, 4)
    run.advance(40)
    run.slow = {0: 3.0, 3: 3.0, 5: 3.0}  # what several ranks show is usual from then on
    run.advance(1)
    run.slow = {}
    run.advance(8)
    run.slow = {2: 12.0}
    run.advance(1)
    run.slow = {2: 2.5}
    assert subjects(run.advance(20)) == [("straggler", 2, "node-1")]


def test_stalls_that_a_job_has_all_the_time_are_not_reported():
    run = watched(DEMO, 6, noise=Noise(outliers=0.02))
    assert len(run.advance(200)) <= 2


def test_ranks_that_stall_together_are_not_reported():
    run = watched(DEMO, 7)
    run.advance(40)
    run.stalled = dict.fromkeys((0, 1, 2), 0.5 * STEP_SECONDS)
    run.advance(1)
    run.stalled = {}
    assert run.advance(10) == []


def test_a_stall_is_cleared_when_it_does_not_recur():
    run = watched(DEMO, 8, noise=Noise(outliers=0.0))
    run.advance(40)
    run.stalled = {5: 0.5 * STEP_SECONDS}
    run.advance(1)
    run.stalled = {}
    found = run.advance(70)
    assert [(one.rank, one.cleared) for one in found] == [(5, False), (5, True)]
    assert found[0].fingerprint == found[1].fingerprint


@pytest.mark.parametrize("apart", [55, 300])
def test_similar_stalls_are_reported_until_they_are_usual(apart):
    run = watched(DEMO, 9, noise=Noise(outliers=0.0))
    run.advance(40)
    notes = []
    for rank in (5, 2, 5, 3):
        run.stalled = {rank: 0.5 * STEP_SECONDS}
        run.advance(1)
        run.stalled = {}
        notes += [one.rank for one in run.advance(apart) if not one.cleared]
    assert notes == [5, 2, 5]
