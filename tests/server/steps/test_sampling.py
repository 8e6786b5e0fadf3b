"""A part of short steps is analyzed, and stands for the others."""

from __future__ import annotations

import pytest

from paceline_server.steps.sampling import ANALYZED_SECONDS, LONG_SECONDS, StepSampler

STEPS = 20_000


def taken(seconds: float, long: dict[int, float] | None = None) -> tuple[list[int], int]:
    """Return the analyzed steps, and the number of those that they stand for."""
    sampler, steps, skipped = StepSampler(), [], 0
    for step in range(STEPS):
        if sampler.takes(step, (long or {}).get(step, seconds)):
            steps.append(step)
            skipped += sampler.take_skipped()[0]
    return steps, skipped


@pytest.mark.parametrize("seconds", [ANALYZED_SECONDS, 0.06, 1.0, 60.0])
def test_steps_that_take_longer_than_their_analysis_are_all_analyzed(seconds: float):
    assert taken(seconds) == (list(range(STEPS)), 0)


@pytest.mark.parametrize("seconds", [0.001, 0.003, 0.008, 0.019])
def test_one_short_step_is_analyzed_in_each_time_of_an_analysis(seconds: float):
    steps, skipped = taken(seconds)
    assert steps[:60] == list(range(60)), "the first ones show how long they are"
    group = int(min(ANALYZED_SECONDS / seconds, 64))
    assert len(steps) == pytest.approx(64 + (STEPS - 64) / group, rel=0.05)
    assert len(steps) + skipped == pytest.approx(STEPS, abs=2 * group)


@pytest.mark.parametrize("period", [2, 5, 8, 10, 20, 64])
def test_what_recurs_is_seen_as_often_as_it_comes(period: int):
    steps, _ = taken(0.005)
    seen = sum(step % period == 0 for step in steps[100:])
    assert seen == pytest.approx(len(steps[100:]) / period, rel=0.25)


def test_a_long_step_is_always_analyzed():
    long = dict.fromkeys(range(1000, STEPS, 1111), LONG_SECONDS)
    steps, _ = taken(0.002, long)
    assert {*long} <= {*steps}


def test_steps_that_become_long_are_all_analyzed_again():
    steps, _ = taken(0.002, dict.fromkeys(range(10_000, STEPS), 0.1))
    assert steps[-9000:] == list(range(STEPS - 9000, STEPS))
