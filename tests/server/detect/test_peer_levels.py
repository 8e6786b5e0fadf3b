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
