"""Spikes and divergence of the loss, against the job's own losses."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest

from paceline_server.detect.finding import Finding
from paceline_server.detect.loss.detector import DIVERGENCE, SPIKE, LossDetector
from paceline_server.detect.non_finite_loss.detector import NonFiniteLossDetector
from paceline_server.detect.observation import Generation
from paceline_server.policy import Policy
from paceline_wire.topology import Topology

RANKS = 4


class Losses:
    """The one part of an observation that these detectors read."""

    def __init__(self, losses: dict[int, tuple[int, float]]) -> None:
        self.losses = losses
        self.now_ns = 1


class Run:
    """A training with seeded losses; `step` reports those of all ranks."""

    def __init__(self, seed: int = 1, **policy: Any) -> None:
        generation = Generation("job", 1, Topology(RANKS, 1, 1), {}, {}, 0)
        policy_ = Policy(**policy)
        self.detectors = [
            LossDetector(generation, policy_),
            NonFiniteLossDetector(generation, policy_),
        ]
        self.chance = random.Random(seed)
        self.number = -1

    def usual(self) -> float:
        """Return a loss that falls like that of a language model, with the noise of a batch."""
        return 2.0 + 8.0 / (1.0 + self.number / 20.0) + self.chance.gauss(0.0, 0.05)

    def step(self, **given: float) -> list[Finding]:
        """Report one step; `given`: losses of ranks such as `rank2`, or of `all` ranks."""
        self.number += 1
        losses = {
            rank: (self.number, given.get(f"rank{rank}", given.get("all", self.usual())))
            for rank in range(RANKS)
        }
        observation = cast(Any, Losses(losses))
        return [found for one in self.detectors for found in one.update(observation)]

    def steps(self, count: int, **given: float) -> list[Finding]:
        return [found for _ in range(count) for found in self.step(**given)]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_training_has_no_spike(seed: int) -> None:
    assert Run(seed).steps(2_000) == []


@pytest.mark.parametrize("first", [1.0, 0.0])
@pytest.mark.parametrize("rise", [4.4e-17, 5e-7])
def test_a_rise_from_zero_to_nearly_zero_is_none(first: float, rise: float) -> None:
    """The loss of a model that knows its data by heart."""
    run = Run(loss_divergence_steps=30)
    run.steps(10, all=first)
    run.steps(200, all=0.0)
    assert run.steps(100, all=rise) == []
    [spike] = run.step(all=2.0)
    assert spike.cause == SPIKE


def test_a_spike_is_shown_and_cleared_when_the_loss_returns() -> None:
    run = Run()
    run.steps(300)
    [spike] = run.step(all=9.0)
    assert (spike.kind, spike.cause, spike.severity) == ("loss", SPIKE, "info")
    assert (spike.onset_step, spike.step) == (300, 300)
    assert run.steps(20, all=8.0) == []
    [over] = run.step()
    assert over.cleared
    assert over.fingerprint == spike.fingerprint
    assert run.steps(500) == [], "the spike is not part of the usual losses"


def test_a_spike_that_does_not_return_is_a_divergence_once() -> None:
    run = Run(loss_divergence_steps=30)
    run.steps(300)
    found = run.steps(100, all=9.0)
    assert [one.cause for one in found] == [SPIKE, DIVERGENCE]
    assert found[1].severity == "critical"
    assert (found[1].onset_step, found[1].step) == (300, 330)
    assert "has not returned for 30 steps" in found[1].summary
    assert "9 at step 300" in found[1].evidence[1].text


def test_one_rank_with_another_batch_is_no_spike_of_the_job() -> None:
    run = Run()
    run.steps(300)
    assert run.step(rank2=50.0) == []
    assert run.steps(50) == []


def test_a_loss_that_falls_or_starts_high_is_no_spike() -> None:
    run = Run()
    assert run.steps(15, all=900.0) == []
    assert run.steps(200) == []
    assert run.step(all=0.1) == []


def test_a_constant_loss_has_no_spike_of_rounding() -> None:
    run = Run()
    run.steps(100, all=1.0)
    assert run.step(all=1.000001) == []
    assert [one.cause for one in run.step(all=2.0)] == [SPIKE]


def test_a_nan_is_left_to_its_own_detector_and_names_the_step_after_the_last_good_one() -> None:
    run = Run()
    run.steps(100)
    run.number += 5  # steps between two reports of a fast training
    [found] = run.step(all=math.nan)
    assert (found.kind, found.cause) == ("failure", "non-finite loss")
    assert found.onset_step == 100


def test_repeated_reports_of_one_step_count_once() -> None:
    run = Run()
    run.steps(300)
    found = run.step(all=9.0)
    for _ in range(200):
        run.number -= 1
        found += run.step(all=9.0)
    assert [one.cause for one in found] == [SPIKE]
