"""A restart that a person requests is carried out in every mode, and saves first if it can."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.request import requested_restart
from paceline_server.decide.types import ActionView, Experience
from paceline_server.policy import Policy
from paceline_wire.commands import ControlRanks

from .simulator import World
from .test_launch import LaunchedWorld


def request(world: World, *, saves: bool = True, exclude: tuple[str, ...] = ()) -> None:
    """Store the request of a person, as the API does."""
    action = requested_restart(
        "act-by-ada",
        generation=world.generation,
        created_ns=world.now_ns,
        by="ada",
        comment="its NIC flaps",
        exclude=exclude,
        saves=saves,
    )
    world.actions[action.action_id] = action
    world.approved.add(action.action_id)


def requested(world: World) -> ActionView:
    return world.actions["act-by-ada"]


@pytest.mark.parametrize("mode", ["observe", "dry-run", "approve", "auto"])
def test_the_job_saves_and_restarts_without_the_node(world: World, mode: str) -> None:
    world.policy = Policy(mode=mode)  # type: ignore[arg-type]
    before = world.highest_step
    request(world, exclude=("node-1",))
    world.tick()
    assert world.phase() == "checkpoint"
    assert requested(world).reason.endswith(
        " or later and restart without node-1: requested by ada: its NIC flaps."
    )
    world.until_running(2)
    assert (requested(world).state, requested(world).lost_steps) == ("done", 0)
    assert (world.highest_step or 0) >= (before or 0)
    assert "node-1" not in world.started_on(2)
    assert world.quarantined == {"node-1": "requested by ada: its NIC flaps."}


def test_it_restarts_in_place(world: World) -> None:
    request(world)
    world.until_running(2)
    assert world.started_on(2) == world.started_on(1)
    assert not world.quarantined


def test_without_a_checkpoint_the_ranks_are_stopped_at_once(world: World) -> None:
    request(world, saves=False)
    world.tick()
    assert world.phase() == "stop"
    assert "Price: 1 step" in requested(world).reason
    assert not any(isinstance(one.command, ControlRanks) for one in world.commands)
    world.until_running(2)


def test_a_script_that_cannot_save_is_not_stopped(world: World) -> None:
    world.can_checkpoint = False
    request(world)
    world.run(2.0)
    assert requested(world).state == "failed"
    assert "cannot save a checkpoint on command" in str(requested(world).error)
    assert (world.state, world.generation) == ("running", 1)


def test_a_script_that_saves_by_itself_is_stopped_after_its_next_checkpoint(world: World) -> None:
    world.can_checkpoint, world.checkpoint_every = False, 40
    world.until(lambda: (world.checkpoint_step or 0) >= 80, 120.0)
    world.experience = Experience(checkpoint_interval_steps=40)
    request(world)
    world.run(1.0)
    assert requested(world).is_waiting
    assert "not known to resume" in requested(world).reason
    world.until_running(2)
    assert requested(world).lost_steps == 1


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_that_hangs_is_restarted_without_a_checkpoint(world: World, saves: bool) -> None:
    world.policy = Policy(mode="observe")
    world.hang(3)
    world.until(lambda: bool(world.open_incidents()))
    request(world, saves=saves)
    world.tick()
    assert world.phase() == "stop"
    world.until_running(2)
    assert not world.open_incidents()


def test_the_job_is_not_stopped_if_the_other_nodes_have_no_room(world: World) -> None:
    request(world, exclude=tuple(world.nodes))
    world.run(1.0)
    assert requested(world).error == (
        "The job does not fit on the nodes without node-0, node-1, node-2, node-3 and node-4; "
        "it was not stopped."
    )
    assert (world.state, world.generation) == ("running", 1)


def test_a_repair_that_began_first_supersedes_it(world: World) -> None:
    world.policy = Policy(mode="auto")
    world.tick((world.finding(),))
    request(world)
    world.tick()
    assert requested(world).state == "superseded"
    world.until_running(2)


@pytest.mark.parametrize("answer", ["done", "failed"])
def test_its_launcher_is_asked_first(answer: str) -> None:
    world = LaunchedWorld("approve")
    request(world, exclude=("node-1",))
    world.run(2.0)
    (check,) = world.requests
    assert (check.kind, check.exclude) == ("check", ["slurm-node-1"])
    assert (requested(world).state, world.state) == ("approved", "running")
    world.answer("check", answer, "No node is free.")  # type: ignore[arg-type]
    world.run(0.5)
    if answer == "failed":
        assert (requested(world).state, requested(world).error) == ("failed", "No node is free.")
        assert world.state == "running"
        return
    world.until(lambda: world.phase() == "launch")
    world.answer("restart", "done")
    world.relaunch(without="node-1")
    world.until_running(101)
    assert requested(world).state == "done"


def test_a_request_for_an_earlier_generation_is_superseded(world: World) -> None:
    request(world)
    world.actions["act-by-ada"] = replace(requested(world), generation=0)
    world.run(1.0)
    assert (requested(world).state, world.generation) == ("superseded", 1)
