"""The expected cost of a microbatch: learned from all ranks, not biased by a single one."""

import numpy as np
import pytest

from paceline_server.detect.statistics.lengths import ExpectedCompute, fit_cost
from paceline_server.steps.timing import ComputeTimes
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

TRUE = np.array([0.002, 1e-5, 3e-9])


def step(topology, seed, microbatches=8, slow=None, lengths=True):
    chance = np.random.default_rng(seed)
    rank = np.repeat(np.arange(topology.world_size), microbatches)
    drawn = chance.integers(500, 1500, (rank.size, 4))
    tokens, squared = drawn.sum(axis=1), (drawn**2).sum(axis=1)
    seconds = TRUE @ np.stack([np.ones(rank.size), tokens, squared])
    seconds *= np.exp(chance.normal(0.0, 0.03, rank.size))
    for one, slowdown in (slow or {}).items():
        seconds[rank == one] *= slowdown
    zero = np.zeros(rank.size, dtype=np.int64)
    given = int(lengths)
    return ComputeTimes(
        rank=rank,
        op=zero + Op.FORWARD,
        microbatch=np.tile(np.arange(microbatches), topology.world_size),
        chunk=zero,
        start_ns=zero,
        end_ns=zero,
        self_seconds=seconds,
        tokens=tokens * given,
        squared_tokens=squared * given,
    )


def test_a_fit_finds_the_cost_of_tokens_and_of_attention():
    rows = step(Topology(8, 1, 1), 1, microbatches=64, slow={3: 1.5})
    cost = fit_cost(rows.tokens, rows.squared_tokens, rows.self_seconds)
    assert cost is not None
    expected = TRUE @ np.stack([np.ones(1), np.array([4000]), np.array([4_400_000])])
    assert cost.seconds(np.array([4000]), np.array([4_400_000])) == pytest.approx(
        expected, rel=0.03
    )


@pytest.mark.parametrize("seconds", [[], [np.nan], [0.0, -1.0]])
def test_without_a_measurement_there_is_no_cost(seconds):
    zero = np.zeros(len(seconds), dtype=np.int64)
    assert fit_cost(zero, zero, np.array(seconds)) is None


def test_ranks_with_different_data_are_comparable():
    expected = ExpectedCompute(Topology(4, 1, 1))
    for seed in range(12):
        rows = step(Topology(4, 1, 1), seed)
        expected.learn(rows)
    ratios = expected.ratios(rows)
    assert np.std(rows.self_seconds / rows.self_seconds.mean()) > 0.1
    assert np.std(ratios) < 0.045


@pytest.mark.parametrize("topology", [Topology(1, 1, 1), Topology(4, 2, 1)])
def test_a_fit_never_hides_a_slowdown(topology):
    expected = ExpectedCompute(topology)
    for seed in range(90):
        rows = step(topology, seed, slow={0: 1.3} if seed >= 40 else None)
        expected.learn(rows)
        if seed == 39:
            before = np.median(expected.ratios(rows)[rows.rank == 0])
    after = np.median(expected.ratios(rows)[rows.rank == 0])
    assert after / before == pytest.approx(1.3, rel=0.04)


def test_without_lengths_the_expectation_is_the_usual_time():
    expected = ExpectedCompute(Topology(4, 1, 1))
    rows = step(Topology(4, 1, 1), 1, lengths=False)
    expected.learn(rows)
    assert np.median(expected.ratios(rows)) == pytest.approx(1.0)
    cost = expected.cost(0, 0, Op.FORWARD)
    assert cost is not None
    assert cost.per_token == cost.per_squared_token == 0.0
    assert expected.cost(0, 3, Op.FORWARD) is None
