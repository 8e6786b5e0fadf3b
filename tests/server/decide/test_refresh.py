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
