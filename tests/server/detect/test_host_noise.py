"""A host that occasionally slows all of its ranks."""

import dataclasses

import numpy as np
import pytest
from simulated_step import START_NS, SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.host_noise.detector import PRESSURE, HostNoiseDetector
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(4, 2, 1), one_forward_one_backward(2, 8), jitter=0.03)


def watch(pressure, slow_of, steps=80, seed=0):
    """Play a job.

    `pressure`: share of the time by node; `slow_of(step, chance)`: slowdown by rank.
    """
    random = np.random.default_rng(seed)
    watched = Watched(HostNoiseDetector, JOB.topology)
    for step in range(steps):
        for number in range(4):
            node = f"node-{number}"
            value = pressure.get(node, 0.02) * step * 10
            sample = Sample(PRESSURE, {}, value, START_NS + step * 10_000_000_000)
            watched.telemetry.add(node, sample)
        watched.show([dataclasses.replace(JOB, slow=slow_of(step, random)).play(step)])
    return watched.findings


def noisy(_, random):
    return {2: 1.3, 3: 1.35} if random.random() < 0.4 else {}


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_host_is_reported_but_not_excluded(seed):
    [found] = watch({"node-1": 0.5}, noisy, seed=seed)
    assert (found.kind, found.node, found.rank) == ("host_noise", "node-1", None)
    assert found.ranks == [2, 3]
    assert not found.suspects_node
    assert found.evidence[0].metric == PRESSURE


def test_without_host_metrics_nothing_is_reported():
    assert watch({}, noisy) == []
    assert watch(dict.fromkeys(("node-0", "node-1", "node-2", "node-3"), 0.5), noisy) == []


def test_a_busy_host_that_slows_no_rank_is_healthy():
    assert watch({"node-1": 0.8}, lambda *_: {}) == []


def test_one_slow_rank_does_not_make_its_host_noisy():
    assert watch({"node-1": 0.5}, lambda step, _: {2: 1.4} if step % 3 else {}) == []


def test_a_node_that_is_always_slow_is_not_host_noise():
    assert watch({"node-1": 0.5}, lambda step, _: {2: 1.3, 3: 1.3} if step > 30 else {}) == []


def test_other_evidence_of_the_node_is_shown_once_without_contradiction():
    [found] = watch({"node-1": 0.5}, noisy)
    assert len([line for line in found.evidence if line.metric == PRESSURE]) == 1
    assert not [line for line in found.counter_evidence if line.metric == PRESSURE]
    assert found.causes[0].name == "CPU contention"
