"""When a known problem is reported again."""

import random

import pytest
from simulated_finding import straggler

from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.detect.reporting import MeasuredCost, evidence_changed

CLOCK, POWER = Evidence("clock fell", "clock"), Evidence("power is as before", "power")
BEFORE = straggler(0.6, evidence=[CLOCK], counter_evidence=[POWER])


def diagnosis(likelihood: float = 0.6, *against: Evidence) -> Diagnosis:
    return Diagnosis(
        cause=BEFORE.cause,
        causes=[Cause(BEFORE.cause, likelihood)],
        evidence=[CLOCK],
        counter_evidence=list(against or (POWER,)),
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (diagnosis(), False),
        (diagnosis(0.65), False),
        (diagnosis(0.75), True),
        (diagnosis(0.6, Evidence("power is 1 W higher", "power")), False),
        (diagnosis(0.6, POWER, Evidence("no swap", "swap")), True),
        (Diagnosis(), True),
    ],
)
def test_new_likelihoods_or_exclusions_are_reported_but_new_numbers_are_not(
    found: Diagnosis, expected: bool
):
    assert evidence_changed(found, BEFORE) is expected


def updates(costs: list[float]) -> list[float]:
    """Return the costs that are reported: the first one, and each one that differs notably."""
    cost, reported = MeasuredCost(), []
    for number, measured in enumerate(costs):
        now = cost.add(measured, number + 1)
        if not reported or cost.is_notable(straggler(0.6, cost_ratio=reported[-1]), now):
            reported.append(now)
    return reported


def test_the_cost_of_an_intermittent_problem_does_not_change_with_each_replay():
    assert updates([0.36, 0.44, 0.36, 0.44, 0.38, 0.44, 0.36, 0.42] * 5) == [0.36]


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_cost_of_an_intermittent_problem_is_reported_when_it_is_known(seed: int):
    chance = random.Random(seed)
    measured = [0.2, *(chance.choice([0.25, 0.45, 0.55]) for _ in range(60))]
    first, *later = updates(measured)
    assert first == 0.2
    assert 1 <= len(later) <= 3
    assert later[-1] == pytest.approx(0.42, abs=0.07)


def test_a_cost_that_really_changes_is_reported_after_three_measurements():
    # The first one is of steps before and after the change.
    assert updates([0.33] * 5 + [0.15, 0.01, 0.01]) == pytest.approx([0.33, 0.01])
    assert updates([0.33] * 5 + [0.15, 0.01]) == [0.33]


def test_a_measurement_counts_once_per_tick():
    cost = MeasuredCost()
    assert cost.add(0.3, 1) == cost.add(0.5, 1) == 0.3
    cost.restart()
    assert cost.add(0.5, 1) == 0.5
