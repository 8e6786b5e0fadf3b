"""A restart that a person requests is carried out in every mode, and saves first if it can."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.request import LAUNCHER_SECONDS, requested_restart
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
        comment=" its NIC\nflaps. ",
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


@pytest.mark.parametrize(
    ("obstacle", "text"),
    [
        ("does not save", "cannot save a checkpoint on command"),
        ("saves too often", "saves a checkpoint every 10 steps, so often that a stop could hit"),
        ("reports no step", "has reported no step"),
        ("has ranks that finished", "is about to end"),
        ("is silent", "The agent of node-1 is silent"),
        ("has no room", "have 6 slots for its 8 ranks"),
    ],
)
def test_ranks_that_cannot_save_are_not_stopped(world: World, obstacle: str, text: str) -> None:
    exclude: tuple[str, ...] = ()
    if obstacle == "does not save":
        world.can_checkpoint, world.experience = False, Experience()
    elif obstacle == "saves too often":
        world.can_checkpoint = False
    elif obstacle == "reports no step":
        world.highest_step = None
    elif obstacle == "has ranks that finished":
        world._exited(0, exit_code=0)
    elif obstacle == "is silent":
        world.detects = False
        world.nodes["node-1"].last_seen_ns = 0
        world.nodes["node-1"].connected = False
    else:
        exclude = ("node-0", "node-1")
    request(world, exclude=exclude)
    decision = world.tick()
    assert requested(world).state == "failed"
    assert text in str(requested(world).error)
    assert not decision.commands
    assert (world.state, world.generation) == ("running", 1)


def test_a_job_whose_checkpoint_fails_is_not_stopped(world: World) -> None:
    """A person may request it again with `--now`; a proposal would say the same."""
    world.can_save = False
    request(world)
    world.until(lambda: requested(world).state == "failed")
    assert str(requested(world).error).endswith("Training continues.")
    world.run(1.0)
    assert [*world.actions.values()] == [world.one_action("start"), requested(world)]


def test_a_script_that_saves_by_itself_is_stopped_after_its_next_checkpoint(world: World) -> None:
    world.can_checkpoint, world.checkpoint_every = False, 40
    world.until(lambda: (world.checkpoint_step or 0) >= 80, 120.0)
    world.experience = Experience(checkpoint_interval_steps=40)
    request(world)
    world.run(1.0)
    assert requested(world).is_waiting
    assert "not known to resume" in requested(world).reason
    world.tick((world.finding(),))
    world.until_running(2)
    assert requested(world).lost_steps == 1


@pytest.mark.parametrize("mode", ["observe", "approve", "auto"])
def test_a_wait_for_a_checkpoint_ends_if_the_job_hangs(world: World, mode: str) -> None:
    world.policy = Policy(mode=mode, hang_patience_seconds=5.0)  # type: ignore[arg-type]
    wait_for_its_checkpoint(world)
    world.hang(3)
    world.until_running(2, 120.0)
    assert requested(world).state == ("superseded" if mode == "auto" else "done")


def test_an_incident_of_a_request_that_a_person_rejects_has_its_own_remedy(world: World) -> None:
    world.policy = Policy(mode="auto")
    wait_for_its_checkpoint(world)
    world.tick((world.finding(),))
    assert world.open_incidents()[0].action_ids == []
    world.people(requested(world), "rejected")
    world.can_checkpoint = True
    world.until_running(2)
    assert world.one_action("restart", "done").incident_id == "inc-00000002"


def wait_for_its_checkpoint(world: World) -> None:
    """Request a restart of a script that saves, but not on command."""
    world.can_checkpoint, world.checkpoint_every = False, 100
    world.until(lambda: (world.checkpoint_step or 0) >= 100, 120.0)
    world.experience = Experience(checkpoint_interval_steps=100, resumes=True)
    request(world)
    world.tick()
    assert requested(world).is_waiting


@pytest.mark.parametrize("declared", ["no", "seen"])
def test_a_script_that_does_not_resume_is_not_stopped(world: World, declared: str) -> None:
    world.policy = Policy(resumes=declared)  # type: ignore[arg-type]
    world.can_checkpoint, world.checkpoint_every = False, 40
    world.until(lambda: (world.checkpoint_step or 0) >= 80, 120.0)
    world.experience = Experience(checkpoint_interval_steps=40, resumes=False)
    request(world)
    world.tick()
    assert "would begin again at its first step" in str(requested(world).error)


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


@pytest.mark.parametrize("mode", ["observe", "auto"])
def test_a_restart_whose_start_fails_is_tried_once_more(world: World, mode: str) -> None:
    world.policy = Policy(mode=mode)  # type: ignore[arg-type]
    world.nodes["node-2"].crashes_at_start = 1
    request(world)
    world.until_running(3, 120.0)
    assert requested(world).state == "failed"


def test_requests_use_up_no_budget(world: World) -> None:
    world.policy = Policy(mode="auto", restarts_per_hour=1, cycles_without_progress=1)
    for generation in (2, 3):
        request(world, saves=False)
        world.until_running(generation)
    world.crash(3)
    world.until_running(4)


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
    world.answer("check", "waiting", "Slurm does not answer.")
    world.run(0.5)
    assert requested(world).reason.endswith("no step is repeated. Slurm does not answer.")
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


def test_a_launcher_that_does_not_answer_is_not_waited_for_forever() -> None:
    world = LaunchedWorld("dry-run")
    request(world)
    world.run(LAUNCHER_SECONDS + 1.0)
    assert str(requested(world).error).startswith("Its launcher did not agree within 5 minutes.")
    assert len(world.requests) == 1


def test_a_job_that_hangs_while_its_launcher_is_asked_is_restarted_without_a_checkpoint() -> None:
    world = LaunchedWorld("dry-run")
    request(world)
    world.hang(3)
    world.until(lambda: bool(world.open_incidents()))
    world.answer("check", "done")
    world.until(lambda: world.phase() == "launch")


def test_a_job_that_is_only_observed_meanwhile_is_not_restarted() -> None:
    world = LaunchedWorld("approve")
    request(world)
    world.run(1.0)
    world.policy, world.launch = Policy(mode="observe"), None
    world.run(1.0)
    assert requested(world).error == "Paceline only observes this job now (policy `mode`)."
    assert not world.commands


def test_a_request_for_an_earlier_generation_is_superseded(world: World) -> None:
    request(world)
    world.actions["act-by-ada"] = replace(requested(world), generation=0)
    world.run(1.0)
    assert (requested(world).state, world.generation) == ("superseded", 1)
