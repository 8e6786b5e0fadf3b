"""A moment's stall is told once it is over; what the job shows all the time is not."""

import pytest
from timed_run import FORWARD_SECONDS, Noise, TimedRun, told

from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_server.detect.transient_stall.detector import TransientStallDetector
from paceline_wire.topology import Topology

DEMO = Topology(2, 2, 2)
STEP_SECONDS = 1.25 * 24 * FORWARD_SECONDS


def watched(topology: Topology, seed: int, **settings: object) -> TimedRun:
    return TimedRun(topology, seed, **settings).watch(StragglerDetector, TransientStallDetector)


@pytest.mark.parametrize("lengths", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_stall_is_told_when_it_is_over(steps, lengths):
    run = watched(DEMO, 3, lengths=lengths, noise=Noise(outliers=0.0))
    run.advance(40)
    run.stalled = {5: 0.5 * STEP_SECONDS}
    assert run.advance(steps) == []
    run.stalled = {}
    [found] = run.advance(20)
    assert told([found]) == [("transient_stall", 5, "node-2")]
    assert found.onset_step == 40
    assert (found.severity, found.persistence) == ("info", "transient")
    assert not found.suspects_node


def test_a_stall_of_all_microbatches_is_one_as_well():
    run = watched(DEMO, 4)
    run.advance(40)
    run.slow = {2: 3.0}
    run.advance(2)
    run.slow = {}
    assert told(run.advance(20)) == [("transient_stall", 2, "node-1")]


def test_one_that_stays_is_a_straggler_and_nothing_else():
    run = watched(DEMO, 5)
    run.advance(40)
    run.slow = {2: 2.5}
    assert told(run.advance(30)) == [("straggler", 2, "node-1")]
    run.slow = {}
    assert told(run.advance(30)) == [("straggler", 2, "node-1")]  # cleared


def test_stalls_that_the_job_is_full_of_are_no_news():
    run = watched(DEMO, 6, noise=Noise(outliers=0.02))
    assert len(run.advance(200)) <= 2


def test_ranks_that_are_stuck_together_share_something_else():
    run = watched(DEMO, 7)
    run.advance(40)
    run.stalled = dict.fromkeys((0, 1, 2), 0.5 * STEP_SECONDS)
    run.advance(1)
    run.stalled = {}
    assert run.advance(10) == []


def test_the_note_goes_when_it_does_not_come_back():
    run = watched(DEMO, 8, noise=Noise(outliers=0.0))
    run.advance(40)
    run.stalled = {5: 0.5 * STEP_SECONDS}
    run.advance(1)
    run.stalled = {}
    found = run.advance(70)
    assert [(one.rank, one.cleared) for one in found] == [(5, False), (5, True)]
    assert found[0].fingerprint == found[1].fingerprint


def test_a_stall_like_one_before_is_told_until_the_job_is_used_to_it():
    run = watched(DEMO, 9, noise=Noise(outliers=0.0))
    run.advance(40)
    notes = []
    for rank in (5, 2, 5, 3):
        run.stalled = {rank: 0.5 * STEP_SECONDS}
        run.advance(1)
        run.stalled = {}
        notes += [one.rank for one in run.advance(55) if not one.cleared]
    assert notes == [5, 2, 5]
