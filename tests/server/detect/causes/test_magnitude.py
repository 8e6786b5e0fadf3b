"""The slowdown that a metric explains."""

import pytest

from paceline_server.detect.causes.symptom import inverse, stalled


def test_a_wait_is_compared_with_the_work_of_the_rank_and_not_with_the_step():
    """A rank that works for a tenth of the step and waits for a CPU for a fifth is 3x slower."""
    assert stalled(0.2, 0.0, 0.1) == pytest.approx(3.0)
    assert stalled(0.5, 0.0, 0.5) == pytest.approx(stalled(0.5, 0.0, None)) == 2.0
    assert stalled(0.1, 0.2, 0.1) == 1.0


def test_a_clock_slows_all_of_the_work():
    assert inverse(500.0, 1000.0, 0.1) == 2.0
