"""Ranks to which a model routes more than to others, as to popular experts."""

import dataclasses

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.routing_imbalance.detector import RoutingImbalanceDetector
from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_wire.topology import Topology

TOPOLOGY = Topology(4, 1, 1)
MOST = (40, 40, 120, 40)  # tokens by rank


def routed(steps, first=0, tokens=MOST, slow=None):
    """Yield steps in which the work of each rank grows with the tokens that it receives."""
    chance = np.random.default_rng(first)
    for step in range(first, first + steps):
        received = np.array(tokens(step) if callable(tokens) else tokens)
        received = received + chance.integers(-1, 2, 4)
        work = {rank: 0.2 + 0.8 * count / 60 for rank, count in enumerate(received.tolist())}
        for rank, ratio in (slow or {}).items():
            work[rank] *= ratio
        job = SimulatedStep(TOPOLOGY, one_forward_one_backward(1, 2), jitter=0.02, slow=work)
        timing = job.play(step)
        ranks = dataclasses.replace(timing.ranks, routed_bytes=received * 1024)
        yield dataclasses.replace(timing, ranks=ranks)


def test_a_rank_with_more_tokens_is_advice_with_its_cost():
    watched = Watched(RoutingImbalanceDetector, TOPOLOGY)
    [found] = watched.show(routed(60))
    assert (found.rank, found.severity, found.cause) == (2, "info", "uneven routing")
    assert "receives 2.0x as much as the mean rank" in found.summary
    # By hand: 0.12 s of work of 60 tokens; rank 2 takes 1.8 times that, the mean rank 1.0.
    assert found.cost_ratio == pytest.approx(0.8 * 0.12 / (1.8 * 0.12 + 0.01), rel=0.1)


def test_a_rank_that_changes_from_step_to_step_is_not_named():
    watched = Watched(RoutingImbalanceDetector, TOPOLOGY)
    [found] = watched.show(routed(40, tokens=lambda step: np.roll(MOST, step)))
    assert found.rank is None
    assert found.cost_ratio > 0.3


def test_advice_on_routing_is_cleared_when_it_is_even():
    watched = Watched(RoutingImbalanceDetector, TOPOLOGY)
    watched.show(routed(40))
    watched.show(routed(60, 40, tokens=(60, 60, 60, 60)))
    assert [found.cleared for found in watched.findings] == [False, True]


def test_even_routing_and_slowness_without_it_are_no_routing_imbalance():
    watched = Watched(RoutingImbalanceDetector, TOPOLOGY)
    watched.show(routed(40, tokens=(60, 60, 60, 60)))
    watched.show(routed(40, 40, tokens=(60, 60, 60, 60), slow={1: 1.5}))
    assert watched.findings == []


@pytest.mark.parametrize("tokens", [MOST, lambda step: np.roll(MOST, step // 3)])
def test_a_rank_with_more_tokens_is_no_straggler(tokens):
    watched = Watched(StragglerDetector, TOPOLOGY)
    assert watched.show(routed(100, tokens=tokens)) == []


def test_a_rank_that_is_slower_than_its_tokens_explain_is_a_straggler():
    watched = Watched(StragglerDetector, TOPOLOGY)
    watched.show(routed(60))
    [found] = watched.show(routed(12, 60, slow={2: 1.5}))
    assert found.rank == 2
    assert found.slowdown == pytest.approx(1.5, rel=0.1)


def test_routing_that_is_even_now_and_then_is_one_finding():
    """16 steps of 0.1 s are uneven, the next 16 even, and so on."""
    watched = Watched(RoutingImbalanceDetector, TOPOLOGY, step_seconds=0.1)
    for turn in range(10):
        watched.show(routed(16, 16 * turn, tokens=(60, 60, 60, 60) if turn % 2 else MOST))
    assert [found.cleared for found in watched.findings] == [False]
