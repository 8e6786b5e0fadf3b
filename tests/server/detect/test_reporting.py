"""When a known problem is reported again."""

import pytest
from simulated_finding import straggler

from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.detect.reporting import evidence_changed

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
