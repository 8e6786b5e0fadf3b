"""Ranks on the wrong NUMA node."""

import pytest
from simulated_step import START_NS, SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.misplaced_rank.detector import (
    CHECK_INTERVAL_NS,
    MISPLACEMENTS,
    WARM_UP_NS,
    MisplacedRankDetector,
)
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(2, 2, 1), one_forward_one_backward(2, 4), jitter=0.03)


@pytest.fixture
def watched():
    return Watched(MisplacedRankDetector, JOB.topology)


def measure(watched, metric, values, at_ns=START_NS, job="job"):
    for rank, value in values.items():
        sample = Sample(metric, {"job": job, "rank": str(rank)}, value, at_ns)
        watched.telemetry.add(f"node-{rank // 2}", sample)


def look(watched):
    """Run steps until the next check is due."""
    findings = []
    step = getattr(watched, "step", 0)
    until_ns = watched.until_ns = getattr(watched, "until_ns", START_NS) + CHECK_INTERVAL_NS
    timing = JOB.play(step)
    while timing.ranks.end_ns.max() < until_ns:
        findings += watched.show([timing])
        step += 1
        timing = JOB.play(step)
    watched.step = step
    return findings


@pytest.mark.parametrize("misplacement", MISPLACEMENTS, ids=lambda each: each.what)
def test_a_misplaced_rank_is_reported_once_and_cleared(watched, misplacement):
    measure(watched, misplacement.metric, {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0})
    [found] = look(watched)
    assert (found.kind, found.severity) == ("misplaced_rank", "info")
    assert (found.rank, found.node, found.ranks) == (3, "node-1", [3])
    assert found.cause == misplacement.cause
    assert found.evidence[0].metric == misplacement.metric
    assert look(watched) == []
    measure(watched, misplacement.metric, {3: 0.0}, START_NS + 10**9)
    [over] = look(watched) or look(watched)
    assert over.cleared
    assert over.fingerprint == found.fingerprint


def test_several_misplaced_ranks_are_one_finding(watched):
    measure(watched, MISPLACEMENTS[0].metric, dict.fromkeys(range(4), 1.0))
    [found] = look(watched)
    assert found.ranks == [0, 1, 2, 3]
    assert found.rank is None
    assert "4 ranks" in found.summary


def test_well_placed_ranks_are_no_finding(watched):
    for misplacement in MISPLACEMENTS:
        measure(watched, misplacement.metric, dict.fromkeys(range(4), 0.0))
    assert look(watched) == []


def test_a_rank_that_is_just_starting_is_not_reported(watched):
    measure(watched, MISPLACEMENTS[0].metric, {3: 1.0}, at_ns=WARM_UP_NS - 1)
    assert look(watched) == []


def test_ranks_of_other_jobs_are_ignored(watched):
    measure(watched, MISPLACEMENTS[0].metric, {3: 1.0}, job="another")
    assert look(watched) == []
