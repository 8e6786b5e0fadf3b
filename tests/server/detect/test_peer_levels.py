"""Levels of ranks: a jump that noise hid is distinguished from a steady rise."""

import numpy as np
import pytest

from paceline_server.detect.statistics.peer_levels import PeerLevels

SIZE = 0.3


def levels(course, seed: int, scatter: float) -> PeerLevels:
    """Return the levels of four ranks of which the first one follows `course`."""
    chance = np.random.default_rng(seed)
    found = PeerLevels(4, smallest=0.02, false_alarms=1e-6, resolution=0.004)
    for step in range(120):
        row = chance.laplace(0.0, scatter, 4)
        row[0] += course(step)
        found.push(row)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_a_jump_has_the_step_of_its_onset(seed, scatter):
    found = levels(lambda step: SIZE * (step >= 80), seed, scatter)
    assert found.steps_since_jump(0, SIZE) == pytest.approx(40, abs=3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_a_steady_rise_is_no_jump(seed, scatter):
    found = levels(lambda step: SIZE * max(step - 50, 0) / 70, seed, scatter)
    assert found.steps_since_jump(0, SIZE) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_creep_over_hundreds_of_steps_lasts_until_it_is_over(seed):
    chance = np.random.default_rng(seed)
    found = PeerLevels(4, smallest=0.02, false_alarms=1e-6, resolution=0.004)
    rise, courses = None, []
    for step in range(560):
        row = chance.normal(0.0, 0.01, 4)
        row[0] += 0.001 * step if step < 550 else 0.0
        found.push(row)
        if step == 400:
            rise = found.assume_creep((0,), float(found.moved()[0][0]))
        if rise is not None and "over" not in courses:
            courses.append(found.follow(rise))
    assert set(courses[:-1]) == {"lasts"}
    assert (courses[-1], 400 + len(courses)) == ("over", 553)
