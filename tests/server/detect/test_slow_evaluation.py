"""Evaluations for which the other ranks wait."""

import dataclasses

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.slow_evaluation.detector import SlowEvaluationDetector
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(3, 1, 1), one_forward_one_backward(1, 2), jitter=0.03)
EVERYONE = dict.fromkeys(range(3), 0.2)


def shown(seconds_of, evaluations=8, every=10, world=3):
    """Show a job; `seconds_of(evaluation)` returns the seconds of each rank."""
    job = dataclasses.replace(JOB, topology=Topology(world, 1, 1))
    watched = Watched(SlowEvaluationDetector, job.topology)
    for step in range(evaluations * every):
        seconds = seconds_of(step // every) if step % every == every - 1 else {}
        watched.show([dataclasses.replace(job, evaluation=seconds).play(step)])
    return watched.findings


def test_evaluations_that_differ_a_little_are_healthy():
    assert shown(lambda number: {0: 0.6, 1: 0.8, 2: 0.7 + 0.05 * (number % 3)}) == []


def test_evaluations_of_one_rank_alone_are_healthy():
    assert shown(lambda number: {0: 5.0 + number}) == []


def test_one_slow_evaluation_is_not_reported():
    assert shown(lambda number: {**EVERYONE, 1: 2.0 if number == 4 else 0.2}) == []


def test_a_rank_that_becomes_slow_in_its_evaluations_is_found_and_cleared():
    slow, over = shown(lambda number: {**EVERYONE, 1: 2.0 if number in (3, 4, 5) else 0.2})
    assert (slow.rank, slow.severity, slow.onset_step, slow.step) == (1, "warning", 39, 49)
    assert slow.slowdown == pytest.approx(10.0)
    assert "10.00x longer than its peers since the evaluation in step 39" in slow.summary
    assert slow.cost_ratio == pytest.approx(1.8 / (10 * 0.13 + 2.0), rel=0.05)
    assert (over.rank, over.cleared, over.step) == (1, True, 79)


def test_a_rank_with_more_to_evaluate_from_the_first_time_on_is_advice():
    [found] = shown(lambda number: {**EVERYONE, 0: 2.0})
    assert (found.rank, found.severity, found.cause) == (0, "info", "uneven evaluation")


def test_rollouts_of_random_length_are_healthy():
    """In PPO, a module in `eval()` plays some episodes of random length."""
    random = np.random.default_rng(7)
    lengths = [random.integers(10, 200, (3, 9)).sum(axis=1) / 500 for _ in range(100)]
    for number, one in enumerate(lengths):
        episodes = random.integers(3, 10, 3)
        lengths[number] = one * episodes / 9
    assert shown(lambda number: dict(enumerate(lengths[number].tolist())), 100, every=2) == []


def test_two_ranks_suffice():
    [found] = shown(lambda number: {0: 0.5, 1: 2.0 if number > 3 else 0.5}, world=2)
    assert (found.rank, found.severity, found.onset_step, found.step) == (1, "warning", 49, 59)
