"""Grouping of findings into incidents and symptoms, and their end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.policy import Mode, Policy

from .simulator import World


def test_repeated_findings_are_one_incident_and_one_restart(world: World) -> None:
    for _ in range(5):
        world.tick((world.finding(), world.finding()))
    assert len(world.incidents) == 1
    assert len(world.restart_actions()) == 1


def test_detection_keeps_the_time_and_step_of_the_first_finding(world: World) -> None:
    world.policy = Policy(mode="observe")
    first = world.finding(slowdown=1.5)
    world.run(3.0, (first,))
    world.run(1.0, (world.finding(slowdown=2.5),))
    [incident] = world.open_incidents()
    assert incident.finding.slowdown == 2.5
    assert incident.finding.detected_ns == first.detected_ns
    assert incident.finding.step == first.step


def test_an_unchanged_finding_changes_nothing(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(),))
    decision = world.tick((world.finding(),))
    assert not decision.incidents
    assert not decision.audit


def test_peers_of_a_dead_rank_are_symptoms(world: World) -> None:
    world.crash(3)
    world.tick()
    for rank in (0, 1, 7):
        world.crash(rank, exit_code=1)
    world.until_running(2)
    [incident] = world.incidents.values()
    assert incident.finding.rank == 3
    assert len(incident.symptoms) == 3
    assert len(world.restarts) == 1


def test_a_slow_link_of_a_slow_rank_is_a_symptom(world: World) -> None:
    world.policy = Policy(mode="observe")
    link = world.finding("slow_link", rank=None, node=None, link=(3, 7), ranks=[3, 7])
    other = world.finding("slow_link", rank=None, node=None, link=(0, 1), ranks=[0, 1])
    world.tick((world.finding(rank=3),))
    world.tick((replace(link, fingerprint="slow_link:3-7"),))
    world.tick((replace(other, fingerprint="slow_link:0-1"),))
    first, second = world.open_incidents()
    assert (first.finding.kind, [one.link for one in first.symptoms]) == ("straggler", [(3, 7)])
    assert second.finding.link == (0, 1)


def test_a_kill_after_a_hang_leaves_the_hang_as_the_cause_and_ends_the_wait(world: World) -> None:
    world.detects = False
    hang = world._fatal("hang", "unknown", 3, "node-1")
    kill = world._fatal("failure", "killed by SIGKILL", 6, "node-3")
    world.tick((hang,))
    assert not world.restart_actions(), "the hang may continue by itself"
    world.crash(6)
    world.run(2.0, (replace(kill, follows="hang"),))
    [incident] = world.incidents.values()
    assert (incident.finding.kind, incident.finding.rank) == ("hang", 3)
    assert [one.cause for one in incident.symptoms] == ["killed by SIGKILL"]
    assert world.restart_actions()


def test_a_rank_that_ended_early_does_not_put_its_node_aside(world: World) -> None:
    world.detects = False
    for generation in (1, 2, 3):
        world.crash(6)
        early = world._fatal("failure", "ended early", 6, "node-3")
        world.tick((early,))
        world.until_running(generation + 1)
        world.run(5.0)
    assert not any(action.exclude_nodes for action in world.restart_actions())
    assert [restart.node for restart in world.restarts] == [None, None, None]


@pytest.mark.parametrize("has_straggler", [False, True])
def test_a_watched_job_whose_agents_are_shut_down_was_stopped(
    world: World, has_straggler: bool
) -> None:
    world.policy = Policy(mode="observe")
    world.detects = False
    if has_straggler:
        world.tick((world.finding(severity="critical"),))
    for rank in range(8):
        world.crash(rank)
    world.run(1.0, (world._fatal("failure", "stopped on request", None, "node-0"),))
    world.until(lambda: world.state == "stopped")
    assert not world.open_incidents()


@pytest.mark.parametrize("mode", ["observe", "approve", "auto"])
def test_a_job_that_a_person_interrupts_was_stopped_and_is_not_repaired(
    world: World, mode: Mode
) -> None:
    world.policy = Policy(mode=mode)
    world.detects = False
    actions = len(world.actions)
    for rank in range(8):
        world._exited(rank, exit_code=1, launcher_signal=2)
    fatal = world._fatal("failure", "stopped on request", None, "node-0")
    world.run(1.0, (replace(fatal, severity="info"),))
    world.until(lambda: world.state == "stopped")
    assert len(world.actions) == actions
    assert not world.open_incidents()


def test_a_watched_job_whose_torchrun_received_a_signal_was_stopped_also_if_all_exit_with_0(
    world: World,
) -> None:
    world.policy = Policy(mode="observe")
    world.detects = False
    for rank in range(8):
        world._exited(rank, exit_code=0, launcher_signal=15)
    world.run(1.0, (world._fatal("failure", "stopped on request", None, "node-0"),))
    world.until(lambda: world.state == "stopped")


def test_a_bubble_beside_a_straggler_is_its_symptom(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding("bubble", severity="info", cause="uneven stages"),))
    world.tick((world.finding(),))
    [incident] = world.open_incidents()
    assert incident.finding.kind == "straggler"
    assert [one.kind for one in incident.symptoms] == ["bubble"]


def test_a_cleared_finding_resolves_its_incident_and_withdraws_the_proposal(
    world: World,
) -> None:
    world.policy = Policy(mode="approve")
    world.run(1.0, (world.finding(),))
    world.run(1.0, (world.finding(cleared=True, summary="Rank 2 is as fast as its peers."),))
    assert not world.open_incidents()
    assert world.one_action("restart").state == "superseded"
    assert world.generation == 1


@pytest.mark.parametrize(
    ("changes", "incidents"),
    [
        ({"rank": 3, "kind": "slow_data", "cause": "slow data loading"}, 2),
        ({"rank": 3, "cause": "unknown", "onset_step": 10_000}, 2),
        ({"rank": 3, "cause": "unknown", "onset_step": 1}, 1),  # began together
        ({"rank": 3, "onset_step": 10_000}, 1),  # the same cause
        ({"rank": 2, "kind": "slow_data", "cause": "slow data loading"}, 1),
        ({"rank": None, "cause": "unknown", "fingerprint": "straggler:node:node-1"}, 1),
    ],
)
def test_slowness_of_one_node_is_one_incident_unless_it_is_of_ranks_for_different_reasons(
    world: World, changes: dict[str, object], incidents: int
) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(),))
    world.tick((world.finding(**changes),))  # type: ignore[arg-type]
    assert len(world.open_incidents()) == incidents


def test_an_incident_is_resolved_only_when_every_symptom_is(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(), world.finding(rank=3)))
    world.tick((world.finding(cleared=True),))
    assert len(world.open_incidents()) == 1
    world.tick((world.finding(rank=3, cleared=True),))
    assert not world.open_incidents()


def test_a_rank_that_is_still_slow_is_named_when_the_main_one_has_recovered(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(), world.finding(rank=3, summary="Ranks 2 and 3 are slow.")))
    world.tick((world.finding(cleared=True), world.finding(rank=3, summary="Rank 3 is slow.")))
    [incident] = world.open_incidents()
    assert (incident.finding.rank, incident.finding.summary) == (3, "Rank 3 is slow.")
    assert [one.rank for one in incident.symptoms] == [2]


def test_findings_of_an_old_generation_are_ignored(world: World) -> None:
    world.crash(3)
    world.until_running(2)
    incidents = dict(world.incidents)
    world.run(5.0, (world.finding(generation=1),))
    assert world.incidents == incidents
    assert world.generation == 2


def test_findings_made_during_a_restart_open_incidents_after_it(world: World) -> None:
    world.crash(3)
    world.until(lambda: world.phase() == "start")
    world.tick((world.finding(),))  # a finding of generation 2, for now a symptom
    assert len(world.incidents) == 1
    world.until(lambda: len(world.restart_actions()) == 2)
    world.until_running(3)
    assert "node-1" not in world.started_on(3)
    assert not world.open_incidents()


@pytest.mark.parametrize("crash_is_known_first", [True, False])
def test_two_incidents_at_once_lead_to_one_restart(
    world: World, crash_is_known_first: bool
) -> None:
    world.detects = False
    crash = world._fatal("failure", "killed by signal 9", 6, "node-3")
    findings = (crash, world.finding()) if crash_is_known_first else (world.finding(), crash)
    world.crash(6)
    world.tick(findings)
    world.detects = True
    world.until_running(2)
    assert len(world.restarts) == 1
    assert "node-1" not in world.started_on(2)
    assert "node-3" in world.started_on(2)
    assert not world.open_incidents()
