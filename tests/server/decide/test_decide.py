"""The whole loop against simulated agents: every fault, every mode, every bad moment."""

from __future__ import annotations

import pytest

from paceline_server.decide.types import Policy
from paceline_server.detect.finding import Finding
from paceline_wire.commands import ControlRanks, StartRanks, StopGeneration
from paceline_wire.topology import Topology

from .simulator import World


@pytest.fixture
def world() -> World:
    """Eight ranks on node-0..node-3, node-4 spare, some steps done."""
    world = World()
    world.until_running(1)
    world.run(10.0)
    return world


# --- start, end, stop -----------------------------------------------------------------------


def test_a_job_starts_on_the_first_nodes_in_blocks() -> None:
    world = World(nodes=12)
    world.until_running(1)
    assert [world.home(rank) for rank in range(8)] == [f"node-{rank // 2}" for rank in range(8)]
    starts = [one.command for one in world.commands if isinstance(one.command, StartRanks)]
    assert {(one.master_address, one.master_port) for one in starts} == {("10.0.0.0", 29500)}
    assert world.one_action("start").state == "done"
    assert not world.restarts


def test_a_job_waits_until_there_are_slots_for_all_of_it() -> None:
    world = World()
    for index in (2, 3):
        world.nodes[f"node-{index}"].heard = False
    world.run(8.0)
    assert world.state == "pending"
    assert not world.actions
    world.nodes["node-2"].heard = True
    world.until_running(1)
    assert world.started_on(1) == {"node-0", "node-1", "node-2", "node-4"}


def test_a_healthy_job_is_left_alone(world: World) -> None:
    commands = len(world.commands)
    world.run(60.0)
    assert len(world.commands) == commands
    assert not world.incidents
    assert world.decisions[-1].state is None


def test_a_job_whose_ranks_all_exit_cleanly_is_finished() -> None:
    world = World(last_step=5)
    world.until(lambda: world.state == "finished")
    assert not world.incidents


def test_a_person_stops_the_job(world: World) -> None:
    world.stop_requested = True
    world.until(lambda: world.state == "stopped")
    assert not world.processes()
    assert world.one_action("stop").state == "done"


def test_a_pending_job_is_stopped_at_once() -> None:
    world = World(nodes=1)
    world.stop_requested = True
    world.tick()
    assert world.state == "stopped"
    assert not world.commands


def test_a_stop_in_the_middle_of_a_restart_supersedes_it(world: World) -> None:
    world.crash(3)
    world.until(lambda: world.phase() == "start")
    world.stop_requested = True
    world.until(lambda: world.state == "stopped")
    assert world.one_action("restart").state == "superseded"
    assert not world.processes()


def test_a_stop_that_a_node_never_confirms_ends_with_its_name(world: World) -> None:
    world.nodes["node-2"].obeys_stop = False
    world.stop_requested = True
    world.until(lambda: world.state == "stopped", seconds=90)
    action = world.one_action("stop")
    assert action.state == "failed"
    assert "node-2" in (action.error or "")


# --- each fault -----------------------------------------------------------------------------


def test_a_throttled_node_is_left_by_an_agreed_checkpoint_and_no_step_is_lost(
    world: World,
) -> None:
    world.tick((world.finding(),))
    action = world.one_action("restart")
    assert action.reason == (
        f"Checkpoint at step {world.highest_step + 3} and restart without node-1: "  # type: ignore[operator]
        "Rank 2 is 2.5x slower: thermal throttle on node-1. "
        f"(Figures of step {world.highest_step}.)"
    )
    assert world.state == "recovering"
    world.until_running(2)
    action = world.one_action("restart")
    assert action.state == "done"
    assert action.lost_steps == 0
    assert [one.name for one in action.phases] == [
        "checkpoint",
        "stop",
        "place",
        "start",
        "observe",
        "done",
    ]
    assert [world.home(rank) for rank in range(8)] == [
        "node-0", "node-0", "node-4", "node-4", "node-2", "node-2", "node-3", "node-3",
    ]  # fmt: skip
    assert list(world.quarantined) == ["node-1"]
    assert not world.open_incidents()
    assert len(world.incidents) == 1


def test_a_killed_rank_is_restarted_in_place_from_the_checkpoint(world: World) -> None:
    reached, saved = world.highest_step, world.checkpoint_step
    assert reached is not None
    assert saved is not None
    homes = [world.home(rank) for rank in range(8)]
    world.crash(3)
    took = world.until_running(2)
    assert took < 2.0
    action = world.one_action("restart")
    assert action.reason == "Restart in place: Rank 3: killed by signal 9."
    assert not any(isinstance(one.command, ControlRanks) for one in world.commands)
    assert action.resumed_step == saved
    assert action.lost_steps == reached + 1 - saved
    assert [world.home(rank) for rank in range(8)] == homes
    assert not world.quarantined


def test_a_hanging_rank_is_restarted_in_place(world: World) -> None:
    world.hang(5)
    world.until_running(2)
    [incident] = world.incidents.values()
    assert incident.finding.kind == "hang"
    assert incident.state == "resolved"


def stuck(world: World, **changes: object) -> Finding:
    return world.finding(
        "hang",
        **{
            "cause": "stuck in all_reduce data#7",
            "rank": 5,
            "node": world.home(5),
            "severity": "critical",
            "can_checkpoint": False,
            **changes,
        },
    )


def test_a_hang_that_may_go_on_by_itself_is_given_time(world: World) -> None:
    patience = world.policy.hang_patience_seconds
    world.tick((stuck(world),))
    world.run(patience - 0.5)
    assert world.state == "running"
    world.run(1.0)
    assert world.state == "recovering"
    world.until_running(2)


def test_a_hang_that_has_gone_on_by_itself_restarts_nothing(world: World) -> None:
    world.tick((stuck(world),))
    world.run(5.0)
    world.tick((stuck(world, cleared=True),))
    world.run(10.0)
    assert (world.state, world.generation) == ("running", 1)
    assert [action.kind for action in world.actions.values()] == ["start"]


def test_a_mismatch_never_goes_on(world: World) -> None:
    world.tick((stuck(world, side="mismatch"),))
    world.run(0.2)
    assert world.state == "recovering"


def test_a_lost_node_is_replaced_once_its_lease_has_lapsed(world: World) -> None:
    world.lose("node-2")
    world.until_running(2)
    assert world.home(4) == world.home(5) == "node-4"
    assert world.home(0) == "node-0"


def test_ranks_of_a_lost_gpu_go_elsewhere(world: World) -> None:
    world.lose_gpu("node-2", 1)
    world.until_running(2)
    assert world.home(4) == world.home(5) == "node-4"
    assert world.topology == Topology(2, 2, 2)


def test_a_node_with_a_lost_gpu_is_used_for_the_rest_where_there_is_no_other() -> None:
    world = World(nodes=1, topology=Topology(2, 2, 2), slots=8)
    world.until_running(1)
    world.lose_gpu("node-0", 2)
    world.until_running(2)
    assert world.topology == Topology(1, 2, 2)
    assert [rank.gpu for rank in world.ranks] == [0, 1, 3, 4]
    assert not world.nodes["node-0"].quarantined
    world.nodes["node-0"].lost_gpus.clear()
    world.run(5.0)
    world.crash(0)
    world.until_running(3)
    assert world.topology == Topology(2, 2, 2), "the GPU is back, and so is its slot"


def test_ranks_of_a_lost_node_wait_for_its_lease_even_if_their_peers_crash_first(
    world: World,
) -> None:
    last_seen_ns = world.now_ns
    world.lose("node-2")
    world.crash(0, exit_code=1)  # a peer that lost its connection
    world.until(lambda: world.generation == 2)
    assert (world.now_ns - last_seen_ns) / 1e9 > world.policy.node_lease_seconds
    assert "node-2" not in world.started_on(2)
    world.until_running(2)
    [incident] = world.incidents.values()
    assert incident.finding.cause == "node lost"  # the culprit, not the victim seen first
    assert any(one.cause == "killed by signal None" for one in incident.symptoms)


def test_slow_data_of_the_process_itself_is_only_told(world: World) -> None:
    slow_data = world.finding(cause="data loading", suspects_node=False)
    world.run(5.0, (slow_data,))
    action = world.one_action("notify")
    assert action.state == "done"
    assert action.finished_ns is not None
    assert world.generation == 1
    assert world.state == "running"
    [incident] = world.open_incidents()
    assert incident.action_ids == [action.action_id]


def test_slow_data_of_the_node_leads_away_from_it(world: World) -> None:
    world.tick((world.finding(cause="data loading"),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


def test_a_bubble_is_advice_and_no_action(world: World) -> None:
    world.run(5.0, (world.finding("bubble", severity="info", cause="uneven stages"),))
    assert [one.kind for one in world.actions.values()] == ["start"]
    assert len(world.open_incidents()) == 1


@pytest.mark.parametrize(
    ("cause", "suspects_node", "severity"),
    [("unknown", False, "critical"), ("CPU contention", True, "warning")],
)
def test_what_may_go_by_itself_leads_away_from_its_node_only_if_it_persists(
    world: World, cause: str, suspects_node: bool, severity: str
) -> None:
    first = world.finding(
        cause=cause,
        suspects_node=suspects_node,
        severity=severity,
        onset_step=world.highest_step,
    )
    world.tick((first,))
    world.run(5.0)
    assert not world.restart_actions()
    world.until_running(2, seconds=30)
    assert "node-1" not in world.started_on(2)


def test_a_straggler_whose_cause_is_found_later_is_acted_on_then(world: World) -> None:
    world.tick((world.finding(cause="unknown", suspects_node=False),))
    assert world.one_action("notify").state == "done"
    world.tick((world.finding(),))
    [incident] = world.open_incidents()
    assert incident.finding.cause == "thermal throttle"
    assert world.one_action("restart").state == "running"


@pytest.mark.parametrize(
    ("kind", "persistence", "severity"),
    [
        ("transient_stall", "transient", "info"),
        ("straggler", "chronic", "info"),
        ("straggler", "chronic", "critical"),
        ("straggler", "transient", "critical"),
    ],
)
def test_what_is_transient_or_chronic_never_leads_to_a_restart(
    world: World, kind: str, persistence: str, severity: str
) -> None:
    found = world.finding(
        kind, persistence=persistence, severity=severity, onset_step=0, suspects_node=True
    )
    world.run(30.0, (found,))
    assert not world.restart_actions()
    assert world.generation == 1


def test_a_slow_link_leads_away_from_the_node_whose_port_is_suspected(world: World) -> None:
    world.tick((world.finding("slow_link", cause="NIC errors", rank=None, suspects_node=True),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


def test_a_slow_link_of_unknown_cause_is_only_told(world: World) -> None:
    found = world.finding(
        "slow_link", cause="unknown", rank=None, severity="critical", onset_step=0
    )
    world.run(30.0, (found,))
    assert not world.restart_actions()
    assert world.one_action("notify").state == "done"


def test_a_slow_node_is_left_like_a_slow_rank(world: World) -> None:
    world.tick((world.finding(rank=None, ranks=[2, 3], persistence="persistent"),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


# --- grouping -------------------------------------------------------------------------------


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


def test_an_incident_is_over_only_when_every_symptom_is(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(), world.finding(rank=3)))
    world.tick((world.finding(cleared=True),))
    assert len(world.open_incidents()) == 1
    world.tick((world.finding(rank=3, cleared=True),))
    assert not world.open_incidents()


def test_findings_of_an_old_generation_do_nothing(world: World) -> None:
    world.crash(3)
    world.until_running(2)
    incidents = dict(world.incidents)
    world.run(5.0, (world.finding(generation=1),))
    assert world.incidents == incidents
    assert world.generation == 2


def test_what_was_found_during_a_restart_is_looked_at_when_it_is_over(world: World) -> None:
    world.crash(3)
    world.until(lambda: world.phase() == "start")
    world.tick((world.finding(),))  # of generation 2: a symptom for now
    assert len(world.incidents) == 1
    world.until(lambda: len(world.restart_actions()) == 2)
    world.until_running(3)
    assert "node-1" not in world.started_on(3)
    assert not world.open_incidents()


@pytest.mark.parametrize("crash_is_known_first", [True, False])
def test_two_incidents_at_once_are_one_restart_that_cures_both(
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


# --- modes ----------------------------------------------------------------------------------


def test_observe_only_watches(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.run(10.0, (world.finding(),))
    assert not world.restart_actions()
    assert len(world.open_incidents()) == 1
    world.crash(3)
    world.run(10.0)
    assert world.generation == 1
    assert len(world.open_incidents()) == 2


def test_observe_calls_a_job_failed_when_no_rank_is_left(world: World) -> None:
    world.policy = Policy(mode="observe")
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    assert world.state == "failed"
    assert world.open_incidents()


def test_dry_run_says_what_it_would_have_done_once(world: World) -> None:
    world.policy = Policy(mode="dry-run")
    world.run(10.0, (world.finding(),))
    action = world.one_action("restart")
    assert action.state == "superseded"
    assert action.reason.startswith("Dry run, not done: Checkpoint and restart without node-1")
    assert world.generation == 1
    assert world.state == "running"


def test_a_proposal_tells_the_figures_that_its_incident_tells(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.tick((world.finding(),))
    assert "2.5x slower" in world.one_action("restart").reason
    world.run(5.0)
    worse = world.finding(slowdown=3.5, summary="Rank 2 is 3.5x slower: it got worse.")
    world.run(1.0, (worse,))
    action = world.one_action("restart")
    assert action.state == "proposed"
    assert action.reason.startswith(
        "Checkpoint and restart without node-1: Rank 2 is 3.5x slower: it got worse. (Figures of"
    )
    world.people(action, "approved")
    world.until(lambda: world.state == "recovering")
    assert "3.5x slower" in world.one_action("restart").reason


def test_approve_waits_for_a_person_and_then_acts(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.run(10.0, (world.finding(),))
    action = world.one_action("restart", "proposed")
    assert world.generation == 1
    world.people(action, "approved")
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0
    assert "node-1" not in world.started_on(2)


def test_a_rejected_action_is_not_proposed_again(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.run(1.0, (world.finding(),))
    world.people(world.one_action("restart"), "rejected")
    world.run(10.0, (world.finding(),))
    action = world.one_action("restart")
    assert action.state == "rejected"
    assert action.finished_ns is not None
    assert world.state == "running"
    assert len(world.open_incidents()) == 1


def test_a_crash_replaces_the_proposal_for_a_straggler(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.run(1.0, (world.finding(),))
    world.crash(6)
    world.tick()
    states = sorted(one.state for one in world.restart_actions())
    assert states == ["proposed", "superseded"]
    world.people(world.one_action("restart", "proposed"), "approved")
    world.until_running(2)
    assert not world.open_incidents()


def test_an_approval_that_comes_too_late_does_nothing(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.run(1.0, (world.finding(),))
    proposed = world.one_action("restart")
    world.policy = Policy(mode="auto")
    world.crash(6)
    world.until_running(2)
    world.people(proposed, "approved")
    world.run(5.0)
    assert world.generation == 2
    assert world.actions[proposed.action_id].state == "superseded"


def test_a_crash_nobody_wants_repaired_ends_the_job_when_all_ranks_are_dead(
    world: World,
) -> None:
    world.policy = Policy(mode="approve")
    for rank in range(8):
        world.crash(rank)
    world.tick()
    assert world.state != "failed"
    world.people(world.one_action("restart"), "rejected")
    world.run(1.0)
    assert world.state == "failed"


# --- bad moments ----------------------------------------------------------------------------


def test_a_checkpoint_that_never_comes_is_given_up(world: World) -> None:
    world.policy = Policy(checkpoint_timeout_seconds=5.0)
    world.can_save = False
    world.detects = False
    world.tick((world.finding(),))
    for node in world.nodes.values():
        node.pending = [one for one in node.pending if not isinstance(one.command, ControlRanks)]
    world.until_running(2)
    action = world.one_action("restart")
    assert action.state == "done"
    assert any("No checkpoint: ranks 0, 1" in one.detail for one in action.phases)
    assert action.lost_steps


def test_a_rank_that_cannot_save_makes_the_restart_unplanned(world: World) -> None:
    world.can_save = False
    world.tick((world.finding(),))
    world.until_running(2)
    assert any("could not save" in one.detail for one in world.one_action("restart").phases)
    assert "node-1" not in world.started_on(2)


def test_a_rank_that_dies_during_the_checkpoint_makes_the_restart_unplanned(
    world: World,
) -> None:
    world.tick((world.finding(),))
    world.tick()
    world.crash(7)
    world.until_running(2)
    action = world.one_action("restart")
    assert any("rank 7 was killed by signal 9" in one.detail for one in action.phases)
    assert len(world.restarts) == 1
    assert not world.open_incidents()


def test_a_rank_that_saved_and_then_crashed_has_saved(world: World) -> None:
    world.tick((world.finding(),))
    world.until(lambda: bool(world.acknowledged))
    assert {one.status for one in world.acknowledged} == {"done"}
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0


@pytest.mark.parametrize("phase", ["start", "observe"])
def test_a_crash_while_coming_up_leads_to_the_next_generation(world: World, phase: str) -> None:
    world.crash(3)
    world.until(lambda: world.phase() == phase)
    world.tick()
    world.crash(4)
    world.until_running(3)
    assert sorted(one.state for one in world.restart_actions()) == ["done", "failed"]
    assert len(world.restarts) == 2
    assert not world.open_incidents()


def test_a_crash_during_the_stop_changes_nothing(world: World) -> None:
    world.crash(3)
    world.tick()
    assert world.phase() == "stop"
    world.crash(4)
    world.until_running(2)
    assert len(world.restarts) == 1


def test_a_node_that_cannot_start_its_ranks_is_left_out_the_second_time(
    world: World,
) -> None:
    world.nodes["node-3"].fails_to_start = True
    world.crash(0)
    world.until_running(4)
    assert world.home(6) == "node-4"
    assert list(world.quarantined) == ["node-3"]


def test_a_start_that_takes_too_long_is_started_over(world: World) -> None:
    world.policy = Policy(start_timeout_seconds=10.0)
    world.detects = False
    world.crash(3)
    world.tick((world._fatal("failure", "killed by signal 9", 3, "node-1"),))
    world.until(lambda: world.generation == 2)
    world.tick()
    world.tick()
    world.hang(1)
    world.until_running(3)
    failed = world.one_action("restart", "failed")
    assert "did not finish a step in time" in (failed.error or "")


def test_a_node_that_does_not_confirm_the_stop_gets_no_ranks_and_is_put_aside(
    world: World,
) -> None:
    world.nodes["node-1"].obeys_stop = False
    world.crash(7)
    world.until_running(2, seconds=90)
    assert "node-1" not in world.started_on(2)
    assert "node-1" in world.quarantined
    stops = [
        one
        for one in world.commands
        if isinstance(one.command, StopGeneration) and one.agent_id == "node-1"
    ]
    assert len(stops) == 2
    assert len({one.command.command_id for one in stops}) == 2


def test_a_late_confirmation_still_counts(world: World) -> None:
    world.nodes["node-1"].obeys_stop = False
    world.crash(7)
    world.run(10.0)
    assert world.phase() == "stop"
    world.nodes["node-1"].obeys_stop = True
    world.until_running(2, seconds=90)
    assert "node-1" in world.started_on(2)
    assert not world.quarantined


def test_a_node_that_comes_back_is_not_trusted_before_it_confirms(world: World) -> None:
    zombies = list(world.nodes["node-2"].processes)
    world.lose("node-4")
    world.lose("node-2")
    world.nodes["node-0"].slots = 1  # nothing else fits
    world.spec = world.spec.__class__(name="gpt", argv=["train"], topology=Topology(1, 4, 2))
    world.run(8.0)
    assert world.phase() == "place"
    assert "Waiting for nodes" in world.one_action("restart").phases[-1].detail
    world.nodes["node-2"].processes = zombies  # it was only cut off
    world.nodes["node-2"].heard = True
    world.nodes["node-0"].slots = 2
    world.until_running(2)
    assert "node-2" in world.started_on(2)


def test_answers_of_other_commands_and_repeated_answers_are_ignored(world: World) -> None:
    world.tick((world.finding(),))
    old = [type(one)(one.rank, 1, "done", 3) for one in world.acknowledged]
    world.acknowledged += [*old, *old]
    world.until(lambda: world.phase() != "checkpoint")
    world.acknowledged *= 2
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0


def test_silence_of_everyone_is_not_taken_for_the_death_of_everyone(world: World) -> None:
    """The server itself was asleep."""
    world.detects = False
    world.crash(3)
    world.tick((world._fatal("failure", "killed by signal 9", 3, "node-1"),))
    world.until(lambda: world.phase() == "observe")
    world.now_ns += 30 * 1_000_000_000
    world.server_is_deaf = True
    world.run(1.0)
    world.server_is_deaf = False
    world.until_running(2)
    assert len(world.restarts) == 1


# --- not enough nodes -----------------------------------------------------------------------


def test_without_a_spare_the_job_shrinks(world: World) -> None:
    world.lose("node-4")
    world.run(6.0)
    world.tick((world.finding(),))
    world.until_running(2)
    assert world.topology == Topology(1, 2, 2)
    assert "node-1" not in world.started_on(2)


def test_a_shrunken_job_grows_back_at_its_next_restart(world: World) -> None:
    world.lose("node-4")
    world.lose("node-1")
    world.until_running(2)
    assert world.topology == Topology(1, 2, 2)
    world.nodes["node-1"].heard = world.nodes["node-4"].heard = True
    for node in world.nodes.values():
        node.quarantined = False
    world.run(1.0)
    world.run(5.0)
    world.crash(0)
    world.until_running(3)
    assert world.topology == Topology(2, 2, 2)


def test_a_job_does_not_shrink_to_become_slower_than_its_straggler_makes_it(
    world: World,
) -> None:
    world.lose("node-4")
    world.run(6.0)
    world.run(5.0, (world.finding(slowdown=1.3, cost_ratio=0.2),))
    assert world.generation == 1
    assert "slower still" in world.one_action("notify").reason


def test_without_any_node_the_job_waits_and_goes_on_when_one_comes() -> None:
    world = World(nodes=2, topology=Topology(1, 2, 2))
    world.until_running(1)
    world.run(5.0)
    world.lose("node-1")
    world.run(20.0)
    assert world.state == "recovering"
    detail = world.one_action("restart").phases[-1].detail
    assert detail == "Waiting for nodes: at least 4 slots are needed, 2 are ready."
    world.nodes["node-7"] = type(world.nodes["node-0"])("node-7")
    world.until_running(2)
    assert world.started_on(2) == {"node-0", "node-7"}


# --- budgets --------------------------------------------------------------------------------


def test_a_job_that_crashes_at_every_start_is_given_up_after_three_restarts(
    world: World,
) -> None:
    world.nodes["node-0"].crashes_at_start = 100
    world.policy = Policy(quarantine_share=0.0)
    world.crash(0)
    world.until(lambda: world.state == "failed", seconds=120)
    assert len(world.restarts) == 3
    assert "the last 3 restarts made no step of progress" in world.one_action("stop").reason
    assert not world.processes()
    starts_ns = [one.at_ns for one in world.restarts]
    assert starts_ns[1] - starts_ns[0] >= 1.0e9
    assert starts_ns[2] - starts_ns[1] >= 2.0e9
    [incident] = world.open_incidents()
    assert incident.state == "open"


def test_a_job_that_cannot_start_at_all_is_given_up_too() -> None:
    world = World(policy=Policy(quarantine_share=0.0))
    world.nodes["node-0"].crashes_at_start = 100
    world.until(lambda: world.state == "failed", seconds=120)
    assert len(world.restarts) == 3


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(restarts_per_hour=2, checkpoint_timeout_seconds=9), "within the last hour"),
        (Policy(restarts_per_hour=99, restarts_per_day=2), "within the last day"),
    ],
)
def test_the_restart_budget_ends_the_job(world: World, policy: Policy, said: str) -> None:
    world.policy = policy
    for generation in (2, 3):
        world.crash(0)
        world.until_running(generation)
        world.run(10.0)
    world.crash(0)
    world.until(lambda: world.state == "failed")
    assert said in world.one_action("stop").reason


def test_a_spent_budget_does_not_stop_a_job_that_is_merely_slow(world: World) -> None:
    world.policy = Policy(restarts_per_hour=0)
    world.run(5.0, (world.finding(),))
    assert world.state == "running"
    assert "not restarted for this" in world.one_action("notify").reason


def test_the_budget_comes_back_with_time(world: World) -> None:
    world.policy = Policy(restarts_per_hour=1)
    world.crash(0)
    world.until_running(2)
    world.run(5.0)
    world.restarts = [
        type(one)(one.generation, one.at_ns - 3601 * 1_000_000_000, one.highest_step)
        for one in world.restarts
    ]
    world.crash(0)
    world.until_running(3)


def test_no_more_than_the_allowed_share_of_nodes_is_quarantined(world: World) -> None:
    world.tick((world.finding(),))
    world.until_running(2)
    world.run(2.0)
    second = world.finding(rank=6, node="node-3", fingerprint="straggler/6")
    world.run(5.0, (second,))
    assert list(world.quarantined) == ["node-1"]
    assert world.generation == 2
    assert "No more nodes may be quarantined" in world.one_action("notify").reason


def test_every_change_leaves_a_line_in_the_audit_log(world: World) -> None:
    world.tick((world.finding(),))
    world.until_running(2)
    verbs = [one.verb for one in world.audit]
    for verb in ("opened", "started generation 2", "quarantined", "resolved", "job is recovering"):
        assert verb in verbs
