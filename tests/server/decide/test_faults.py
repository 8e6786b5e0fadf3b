"""The repair of each kind of fault."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.types import IssuedCommand
from paceline_server.detect.finding import Finding
from paceline_wire.commands import (
    PRELOAD,
    ControlRanks,
    PreloadRanks,
    StartRanks,
    StopGeneration,
)
from paceline_wire.topology import Topology

from .simulator import World


def test_a_throttled_node_is_replaced_after_a_checkpoint_without_losing_a_step(
    world: World,
) -> None:
    world.tick((world.finding(),))
    action = world.one_action("restart")
    assert action.reason == (
        f"Checkpoint at step {world.highest_step + 3} or later and restart "  # type: ignore[operator]
        "without node-1: "
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


def renewed(world: World, generation: int) -> dict[str, bool]:
    """Return whether each node may keep ranks of this generation for the next one."""
    return {
        one.agent_id: one.command.renew
        for one in world.commands
        if isinstance(one.command, StopGeneration) and one.command.generation == generation
    }


def test_after_a_crash_ranks_may_stay_in_their_processes(world: World) -> None:
    world.crash(3)
    world.until_running(2)
    assert set(renewed(world, 1).values()) == {True}
    reached = world.highest_step
    world.until(lambda: (world.highest_step or 0) > (reached or 0) + 20)
    world.crash(4)
    world.until_running(3)
    assert set(renewed(world, 2).values()) == {True}, "the last restart made progress"


def test_ranks_of_a_lost_node_are_replaced_and_the_others_may_stay(world: World) -> None:
    world.lose("node-1")
    world.until_running(2)
    flags = renewed(world, 1)
    assert {node for node, may_stay in flags.items() if may_stay} >= {"node-0", "node-2", "node-3"}


def test_a_crash_before_any_progress_gives_all_ranks_new_processes(world: World) -> None:
    world.crash(3)
    world.until(lambda: any(process.generation == 2 for process in world.processes()))
    world.crash(4)
    world.until_running(3)
    assert set(renewed(world, 2).values()) == {False}


def test_a_planned_move_replaces_the_ranks_of_the_slow_node_and_the_others_may_stay(
    world: World,
) -> None:
    world.tick((world.finding(),))
    world.until_running(2)
    assert {node for node, may_stay in renewed(world, 1).items() if not may_stay} == {"node-1"}


def test_no_rank_stays_after_a_hang_of_unknown_cause(world: World) -> None:
    world.tick((stuck(world),))
    world.until_running(2)
    assert set(renewed(world, 1).values()) == {False}


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


def test_a_hang_that_may_continue_by_itself_gets_time(world: World) -> None:
    patience = world.policy.hang_patience_seconds
    world.tick((stuck(world),))
    world.run(patience - 0.5)
    assert world.state == "running"
    world.run(1.0)
    assert world.state == "recovering"
    world.until_running(2)


def test_a_hang_in_the_same_step_after_a_restart_gets_more_time(world: World) -> None:
    """The script may pause there for longer than the patience; restarts would never end."""
    patience, reached = world.policy.hang_patience_seconds, world.highest_step
    for generation, times in ((1, 1), (2, 4)):
        world.highest_step = reached
        world.hang(5)
        world.tick((stuck(world),))
        world.run(times * patience - 1.0)
        assert (world.state, world.generation) == ("running", generation)
        world.until_running(generation + 1, seconds=5.0)


def test_a_hang_that_ended_by_itself_restarts_nothing(world: World) -> None:
    world.tick((stuck(world),))
    world.run(5.0)
    world.tick((stuck(world, cleared=True),))
    world.run(10.0)
    assert (world.state, world.generation) == ("running", 1)
    assert [action.kind for action in world.actions.values()] == ["start"]


def test_a_rank_that_is_late_restarts_nothing_until_it_is_a_hang(world: World) -> None:
    """A start may legitimately take long; each restart would have to load again."""
    late = "stuck before init_process_group"
    world.tick((stuck(world, severity="warning", cause=late),))
    world.run(60.0)
    assert (world.state, world.generation) == ("running", 1)
    assert {action.kind for action in world.actions.values()} == {"start", "notify"}
    world.tick((stuck(world, cause=late),))
    world.until_running(2)


def test_a_mismatch_is_restarted_immediately(world: World) -> None:
    world.tick((stuck(world, side="mismatch"),))
    world.run(0.2)
    assert world.state == "recovering"


def test_a_lost_node_is_replaced_once_its_lease_has_lapsed(world: World) -> None:
    world.lose("node-2")
    world.until_running(2)
    assert world.home(4) == world.home(5) == "node-4"
    assert world.home(0) == "node-0"


def test_a_spare_preloads_while_the_others_save(world: World) -> None:
    world.spec = replace(world.spec, environment={PRELOAD: "torch"})
    world.tick((world.finding(),))
    world.until_running(2)
    asked = preloaded(world)
    assert [one.agent_id for one in asked] == ["node-4"]
    command = asked[0].command
    assert isinstance(command, PreloadRanks)
    started = next(
        one.command
        for one in world.commands
        if one.agent_id == "node-4" and isinstance(one.command, StartRanks)
    )
    assert command.ranks == started.ranks, "else its environment would be another"
    assert (command.argv, command.environment) == (started.argv, started.environment)
    saving = next(one for one in world.commands if isinstance(one.command, ControlRanks))
    stopping = next(one for one in world.commands if isinstance(one.command, StopGeneration))
    order = [saving.command.command_id, command.command_id, stopping.command.command_id]
    assert order == sorted(order)


def preloaded(world: World) -> list[IssuedCommand]:
    return [one for one in world.commands if isinstance(one.command, PreloadRanks)]


def test_nothing_is_preloaded_unless_requested(world: World) -> None:
    world.tick((world.finding(),))
    world.until_running(2)
    world.run(60.0)
    assert preloaded(world) == []


def test_a_spare_is_kept_warm_for_the_loss_of_a_node(world: World) -> None:
    world.spec = replace(world.spec, environment={PRELOAD: "torch"})
    world.run(30.0)
    assert [one.agent_id for one in preloaded(world)] == ["node-4"]
    world.run(1300.0)
    assert [one.agent_id for one in preloaded(world)] == ["node-4"] * 3
    before = len(world.commands)
    world.lose("node-2")
    world.until_running(2)
    world.run(40.0)
    assert len(preloaded(world)) == 3, "there is no other spare"
    started = [one for one in world.commands[before:] if isinstance(one.command, StartRanks)]
    moved = next(one.command for one in started if one.agent_id == "node-4")
    command = preloaded(world)[0].command
    assert isinstance(command, PreloadRanks)
    assert isinstance(moved, StartRanks)
    places = [[(one.local_rank, one.gpu) for one in each.ranks] for each in (command, moved)]
    assert places[0] == places[1], "else its environment would be another"


def test_no_spare_imports_for_a_job_that_is_only_observed(world: World) -> None:
    world.spec = replace(world.spec, environment={PRELOAD: "torch"})
    world.policy = replace(world.policy, mode="observe")
    world.run(60.0)
    assert preloaded(world) == []


def test_ranks_of_a_lost_gpu_move_to_another_node(world: World) -> None:
    world.lose_gpu("node-2", 1)
    world.until_running(2)
    assert world.home(4) == world.home(5) == "node-4"
    assert world.topology == Topology(2, 2, 2)


def test_the_other_gpus_of_a_node_are_used_if_there_is_no_other_node() -> None:
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
    assert incident.finding.cause == "node lost"  # the culprit, not the peer that crashed first
    assert any(one.cause == "killed by signal None" for one in incident.symptoms)


def test_slow_data_of_the_process_itself_only_notifies(world: World) -> None:
    slow_data = world.finding(cause="data loading", suspects_node=False)
    world.run(5.0, (slow_data,))
    action = world.one_action("notify")
    assert action.state == "done"
    assert action.finished_ns is not None
    assert world.generation == 1
    assert world.state == "running"
    [incident] = world.open_incidents()
    assert incident.action_ids == [action.action_id]


def test_slow_data_of_the_node_excludes_it(world: World) -> None:
    world.tick((world.finding(cause="data loading"),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


def test_a_bubble_leads_to_no_action(world: World) -> None:
    world.run(5.0, (world.finding("bubble", severity="info", cause="uneven stages"),))
    assert [one.kind for one in world.actions.values()] == ["start"]
    assert len(world.open_incidents()) == 1


@pytest.mark.parametrize(
    ("cause", "suspects_node", "severity"),
    [("unknown", False, "critical"), ("CPU contention", True, "warning")],
)
def test_a_passing_cause_excludes_its_node_only_if_it_persists(
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
def test_transient_and_chronic_findings_never_restart(
    world: World, kind: str, persistence: str, severity: str
) -> None:
    found = world.finding(
        kind, persistence=persistence, severity=severity, onset_step=0, suspects_node=True
    )
    world.run(30.0, (found,))
    assert not world.restart_actions()
    assert world.generation == 1


def test_a_slow_link_excludes_the_node_whose_port_is_suspected(world: World) -> None:
    world.tick((world.finding("slow_link", cause="NIC errors", rank=None, suspects_node=True),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


def test_a_slow_link_of_unknown_cause_only_notifies(world: World) -> None:
    found = world.finding(
        "slow_link", cause="unknown", rank=None, severity="critical", onset_step=0
    )
    world.run(30.0, (found,))
    assert not world.restart_actions()
    assert world.one_action("notify").state == "done"


def test_a_slow_node_is_excluded_like_that_of_a_slow_rank(world: World) -> None:
    world.tick((world.finding(rank=None, ranks=[2, 3], persistence="persistent"),))
    world.until_running(2)
    assert "node-1" not in world.started_on(2)
