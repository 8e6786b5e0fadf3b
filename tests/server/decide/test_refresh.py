"""Later evidence is displayed without an alert."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.act.announce import incident_alert
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.policy import Policy

from .simulator import World

LATER = {
    "causes": [Cause("thermal throttle", 0.9)],
    "counter_evidence": [Evidence("power of gpu0 is as before", "DCGM_FI_DEV_POWER_USAGE")],
    "cost_ratio": 0.31,
}


@pytest.fixture
def world() -> World:
    world = World(policy=Policy(mode="observe"))
    world.until_running(1)
    world.run(10.0)
    world.tick((world.finding(),))
    return world


def test_better_evidence_for_the_same_verdict_is_shown_without_an_alert(world):
    [before] = world.open_incidents()
    audit = list(world.audit)
    decision = world.tick((world.finding(**LATER),))
    [after] = decision.incidents
    assert after.finding.counter_evidence == LATER["counter_evidence"]
    assert after.finding.causes == LATER["causes"]
    assert after.finding.cost_ratio == 0.31
    assert after.finding.detected_ns == before.finding.detected_ns
    assert (decision.actions, decision.commands, decision.audit) == ([], [], [])
    assert world.audit == audit
    assert incident_alert("job-1", "job", before, after) is None


def test_the_same_evidence_again_changes_nothing(world):
    world.tick((world.finding(**LATER),))
    assert world.tick((world.finding(**LATER),)).incidents == []


def test_a_weaker_finding_does_not_replace_a_stronger_one(world):
    before = world.open_incidents()
    weaker = replace(world.finding(**LATER), cause="unknown", suspects_node=False)
    assert world.tick((weaker,)).incidents == []
    assert world.open_incidents() == before


def test_a_smaller_cost_of_the_same_problem_is_shown_without_a_lower_severity(world):
    [before] = world.open_incidents()
    milder = world.finding(severity="info", cost_ratio=0.0, speedup=1.0, summary="It costs 0%.")
    decision = world.tick((milder,))
    [after] = decision.incidents
    assert (after.finding.cost_ratio, after.finding.summary) == (0.0, "It costs 0%.")
    assert after.finding.severity == before.finding.severity
    assert (decision.actions, decision.audit) == ([], [])
    assert incident_alert("job-1", "job", before, after) is None


MILDER = {"cost_ratio": 0.02, "summary": "It costs 2%."}


@pytest.fixture
def critical(world: World) -> World:
    world.tick((world.finding(severity="critical"),))
    return world


def _is_milder_for(world: World, seconds: int, **changes: object) -> None:
    for second in range(seconds):
        milder = world.finding(**(MILDER | changes), evidence=[Evidence(f"sample {second}")])
        world.run(1.0, (milder,))


@pytest.mark.parametrize("cause", ["thermal throttle", "unknown"])
def test_the_severity_falls_once_the_slowdown_has_been_milder_for_five_minutes(critical, cause):
    [before] = critical.open_incidents()
    assert before.finding.severity == "critical"
    _is_milder_for(critical, 299, cause=cause)
    [after] = critical.open_incidents()
    assert after.finding.severity == "critical"
    _is_milder_for(critical, 3, cause=cause)
    [after] = critical.open_incidents()
    assert (after.finding.severity, after.finding.cost_ratio) == ("warning", 0.02)
    assert after.finding.detected_ns == before.finding.detected_ns
    alert = incident_alert("job-1", "job", before, after)
    assert alert is not None
    assert (alert.event, alert.previous_severity) == ("updated", "critical")
    assert not alert.is_correction


def test_a_slowdown_that_varies_keeps_its_highest_severity(critical):
    for _ in range(3):
        _is_milder_for(critical, 250)
        critical.run(1.0, (critical.finding(severity="critical"),))
        [incident] = critical.open_incidents()
        assert incident.finding.severity == "critical"


def test_the_severity_stays_while_a_symptom_is_as_severe(critical):
    link = critical.finding("slow_link", link=(2, 3), fingerprint="link", severity="critical")
    critical.tick((link,))
    _is_milder_for(critical, 400)
    [incident] = critical.open_incidents()
    assert incident.finding.severity == "critical"


def test_a_symptom_is_refreshed_in_place(world):
    bubble = world.finding("bubble", cause="late launches", fingerprint="bubble", severity="info")
    world.tick((bubble,))
    world.tick((replace(bubble, evidence=[Evidence("stage 1 idles 30%")]),))
    [incident] = world.open_incidents()
    assert incident.finding.kind == "straggler"
    assert [one.evidence for one in incident.symptoms] == [[Evidence("stage 1 idles 30%")]]


def test_a_refresh_leads_to_no_second_action(world):
    world = World()
    world.until_running(1)
    world.run(10.0)
    world.tick((world.finding(),))
    [action] = [one for one in world.actions.values() if one.kind == "restart"]
    world.tick((world.finding(**LATER),))
    assert [one.action_id for one in world.actions.values() if one.kind == "restart"] == [
        action.action_id
    ]
