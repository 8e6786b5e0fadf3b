"""Planned restarts never destroy the work of a job that makes progress."""

from __future__ import annotations

import pytest

from paceline_server.decide.types import ActionView
from paceline_server.policy import Policy
from paceline_wire.commands import ControlRanks

from .simulator import World


def drop_controls(world: World) -> None:
    """Lose the commands on their way to the ranks."""
    for node in world.nodes.values():
        node.pending = [one for one in node.pending if not isinstance(one.command, ControlRanks)]


def proposal(world: World) -> ActionView:
    return next(one for one in world.actions.values() if one.state == "proposed")


def failed_restart(world: World) -> ActionView:
    return world.one_action("restart", "failed")


@pytest.mark.parametrize("failure", ["cannot save", "does not answer", "never receives it"])
def test_without_a_checkpoint_the_restart_is_called_off_and_proposed(
    world: World, failure: str
) -> None:
    world.policy = Policy(mode="auto", checkpoint_timeout_seconds=5.0)
    world.can_save = failure != "cannot save"
    world.answers = failure != "does not answer"
    world.tick((world.finding(),))
    if failure == "never receives it":
        drop_controls(world)
    world.until(lambda: any(one.state == "failed" for one in world.actions.values()), 120.0)
    assert world.state == "running"
    assert world.generation == 1
    assert failed_restart(world).error is not None
    assert "Training continues." in str(failed_restart(world).error)
    before = world.highest_step
    world.run(30.0)
    assert (world.highest_step or 0) > (before or 0)
    assert "A person has to approve it: no checkpoint could be saved" in proposal(world).reason


def test_a_command_that_was_called_off_is_withdrawn_from_the_ranks(world: World) -> None:
    world.policy = Policy(mode="auto", checkpoint_timeout_seconds=5.0)
    world.answers = False
    world.tick((world.finding(),))
    world.until(lambda: any(one.state == "failed" for one in world.actions.values()), 120.0)
    world.answers = True  # the responses are late
    world.run(20.0)
    assert (world.state, world.generation) == ("running", 1)


def test_a_checkpoint_that_completes_late_is_used(world: World) -> None:
    world.policy = Policy(mode="auto", checkpoint_timeout_seconds=5.0)
    world.answers = False
    world.tick((world.finding(),))
    world.until(lambda: world.phase() == "cancel", 120.0)
    drop_controls(world)  # the withdrawal arrives too late
    world.answers = True
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0


def test_the_reason_names_the_step_that_was_saved(world: World) -> None:
    world.answers = False
    world.tick((world.finding(),))
    world.run(8.0)
    world.answers = True
    world.until_running(2)
    restart = world.one_action("restart")
    assert restart.reason.startswith(f"Checkpoint at step {restart.resumed_step} and restart")


def test_the_reason_names_no_checkpoint_if_none_was_saved(world: World) -> None:
    world.answers = False
    world.tick((world.finding(),))
    assert world.phase() == "checkpoint"
    world.crash(3)
    world.until_running(2)
    assert world.one_action("restart").reason.startswith("Restart without node-1: ")


@pytest.mark.parametrize("declared", [False, None])
@pytest.mark.parametrize("mode", ["auto", "default", "approve"])
def test_a_script_that_cannot_save_on_command_is_restarted_only_by_a_person(
    world: World, mode: str, declared: bool | None
) -> None:
    world.policy = Policy(mode=mode)  # type: ignore[arg-type]
    world.can_checkpoint, world.answers = declared, False
    world.run(20.0)
    world.tick((world.finding(),))
    world.run(60.0)
    assert (world.state, world.generation) == ("running", 1)
    assert not any(isinstance(one.command, ControlRanks) for one in world.commands)
    action = proposal(world)
    assert "cannot save a checkpoint on command" in action.reason
    world.people(action, "approved")
    world.until_running(2)
    assert "node-1" not in world.started_on(2)


def test_a_proposal_shows_its_price_in_steps_and_seconds(world: World) -> None:
    world.can_checkpoint = False
    world.until(lambda: world.highest_step == 44)
    world.checkpoint_step = 40
    world.tick((world.finding(),))
    action = proposal(world)
    assert (action.price_steps, action.price_seconds) == (5, 2.5)
    assert "Price: 5 steps (2 s) since the checkpoint of step 40." in action.reason


def test_the_price_of_an_open_proposal_follows_the_job(world: World) -> None:
    world.can_checkpoint = False
    world.can_save = False
    world.checkpoint_step = None
    world.run(10.0)
    world.tick((world.finding(),))
    first = proposal(world).price_steps
    world.run(60.0)
    latest = proposal(world).price_steps
    assert (latest or 0) > 3 * (first or 0) > 0
    assert (latest or 0) >= 0.9 * (world.highest_step or 0)
    assert "since the start: no checkpoint is known" in proposal(world).reason


def test_a_restart_that_saves_first_is_free(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.run(10.0)
    world.tick((world.finding(),))
    assert proposal(world).price_steps == 0
    assert "Price: no step is repeated." in proposal(world).reason


def test_a_planned_restart_waits_while_a_node_is_silent(world: World) -> None:
    world.policy = Policy(mode="auto", node_lease_seconds=30.0)
    world.run(5.0)
    world.nodes["node-2"].connected = False
    world.detects = False
    world.run(31.0)
    world.run(3.0, (world.finding(),))
    assert not world.restart_actions()


def test_a_planned_restart_is_called_off_if_an_agent_is_silent_while_its_ranks_train(
    world: World,
) -> None:
    world.policy = Policy(mode="auto", node_lease_seconds=3.0)
    world.run(5.0)
    world.answers = False  # for example during a long evaluation
    world.tick((world.finding(),))
    world.until(lambda: world.phase() == "checkpoint")
    world.nodes["node-0"].connected = False
    world.detects = False  # other ranks communicate with those of the node
    world.until(lambda: world.restart_actions()[0].state == "failed", seconds=60.0)
    assert (world.state, world.generation) == ("running", 1)
    assert "Called off: no checkpoint could be saved" in str(world.restart_actions()[0].error)


def test_a_job_without_a_step_is_started_again_without_a_person() -> None:
    world = World(policy=Policy(mode="default"))
    world.can_checkpoint = None
    world.nodes["node-0"].crashes_at_start = 1
    world.until_running(2)


def test_a_crashed_job_that_cannot_save_waits_for_a_person_by_default(world: World) -> None:
    world.policy = Policy(mode="default")
    world.can_checkpoint = False
    world.run(10.0)
    world.crash(3)
    world.run(20.0)
    assert world.generation == 1
    world.people(proposal(world), "approved")
    world.until_running(2)


def in_repeated_steps(world: World) -> int:
    """Let a crash cost a hundred steps, and train a few of them again; return the newest one."""
    world.checkpoint_every = 200
    world.until(lambda: world.highest_step == 300, 200.0)
    world.crash(3)
    world.until_running(2)
    world.run(5.0)
    newest = world.ranks[0].step
    assert newest is not None
    assert newest < 220
    return newest


def test_ranks_that_repeat_steps_save_at_once(world: World) -> None:
    newest = in_repeated_steps(world)
    world.tick((world.finding(),))
    restart = world.one_action("restart", "running")
    assert restart.reason.startswith(f"Checkpoint at step {newest + 3} or later and restart")
    world.until_running(3)
    assert world.actions[restart.action_id].resumed_step == newest + 3


def test_a_passing_slowdown_of_repeated_steps_has_to_persist(world: World) -> None:
    newest = in_repeated_steps(world)
    found = world.finding(cause="CPU contention", onset_step=newest, severity="warning")
    world.run(9.0, (found,))
    assert len(world.restart_actions()) == 1
    world.until_running(3)


def test_a_crash_in_repeated_steps_loses_only_those_since_the_checkpoint(world: World) -> None:
    newest = in_repeated_steps(world)
    world.crash(3)
    world.until_running(3)
    _, later = world.restart_actions()
    assert (later.resumed_step, later.lost_steps) == (200, newest + 1 - 200)
