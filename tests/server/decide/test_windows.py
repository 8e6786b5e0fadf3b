"""Maintenance windows, and windows for planned restarts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from paceline_server.policy import Policy

from .simulator import SECOND, World


def window(world: World, begin: float, end: float) -> str:
    """Return a window in seconds from now."""
    now = datetime.fromtimestamp(world.now_ns / 1e9, UTC)
    times = (now + timedelta(seconds=seconds) for seconds in (begin, end))
    return "/".join(f"{time:%Y-%m-%dT%H:%M:%S}" for time in times)


def test_a_crash_in_a_maintenance_window_waits_for_a_person_and_then_for_its_end(
    world: World,
) -> None:
    world.policy = Policy(mode="auto", maintenance_windows=(window(world, -60, 30),))
    world.crash(3)
    world.run(20.0)
    action = world.one_action("restart")
    assert action.state == "proposed"
    assert "Maintenance window" in action.reason
    assert world.generation == 1
    world.until_running(2)
    assert world.one_action("restart").state == "done"
    assert "Maintenance window" not in world.one_action("restart").reason
    assert world.seconds > 1_040, "not before its end"


def test_a_person_may_approve_in_a_maintenance_window(world: World) -> None:
    world.policy = Policy(mode="auto", maintenance_windows=("daily 00:00-24:00",))
    world.crash(3)
    world.run(2.0)
    world.people(world.one_action("restart"), "approved")
    world.until_running(2)


def test_a_rejected_proposal_is_not_carried_out_after_the_window(world: World) -> None:
    world.policy = Policy(mode="auto", maintenance_windows=(window(world, -60, 10),))
    world.crash(3)
    world.run(2.0)
    world.people(world.one_action("restart"), "rejected")
    world.run(30.0)
    assert world.generation == 1


def test_a_slow_rank_in_a_maintenance_window_is_moved_after_it(world: World) -> None:
    world.policy = Policy(mode="auto", maintenance_windows=(window(world, -60, 20),))
    world.run(5.0, (world.finding(),))
    assert world.one_action("restart").state == "proposed"
    world.until_running(2)
    assert world.seconds > 1_030
    assert "node-1" in world.quarantined


def test_a_window_has_no_effect_on_modes_that_do_not_act_by_themselves(world: World) -> None:
    world.policy = Policy(mode="approve", maintenance_windows=(window(world, -60, 10),))
    world.crash(3)
    world.run(30.0)
    action = world.one_action("restart")
    assert action.state == "proposed"
    assert "Maintenance" not in action.reason


def test_a_planned_restart_waits_for_its_window_and_a_crash_does_not(world: World) -> None:
    world.policy = Policy(mode="auto", planned_restart_windows=(window(world, 3600, 7200),))
    world.run(5.0, (world.finding(),))
    action = world.one_action("restart")
    assert action.state == "proposed"
    assert "in the next window for planned restarts" in action.reason
    world.now_ns += 3600 * SECOND
    for node in world.nodes.values():
        node.last_seen_ns = world.now_ns
    world.until_running(2)
    world.policy = replace(
        world.policy, planned_restart_windows=("2030-01-01T00:00/2030-01-02T00:00",)
    )
    world.crash(5)
    world.until_running(3)


def test_actions_name_the_version_of_the_policy_that_decided_them(world: World) -> None:
    versions = {}
    for number, state in ((3, "proposed"), (4, "running")):
        world.policy_version = number
        if state == "proposed":
            world.policy = Policy(mode="approve")
            world.crash(3)
        else:
            world.people(world.one_action("restart"), "approved")
        world.run(0.3)
        versions[number] = world.one_action("restart")
    assert versions[3].policy_version == 3
    assert (versions[4].state, versions[4].policy_version) == ("running", 4)
