"""A planned restart of a script that cannot save on command waits for its own next checkpoint."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide import propose
from paceline_server.decide.progress import progress_of
from paceline_server.decide.types import ActionView, Experience
from paceline_server.policy import Policy
from paceline_wire.commands import ControlRanks

from .simulator import World

EVERY = 40  # steps of 0.5 s between two checkpoints of the script


@pytest.fixture
def world() -> World:
    """A job of eight ranks that has saved two checkpoints by itself, and has resumed before."""
    world = World(policy=Policy(mode="auto"))
    world.can_checkpoint, world.answers, world.checkpoint_every = False, False, EVERY
    world.experience = Experience(resumes=True)
    world.until_running(1)
    world.until(lambda: world.highest_step == 2 * EVERY + 4)
    return world


def restart(world: World) -> ActionView:
    return max(world.restart_actions(), key=lambda action: action.created_ns)


def test_it_waits_for_the_next_checkpoint_and_one_more_step(world: World) -> None:
    world.tick((world.finding(),))
    action = restart(world)
    assert action.is_waiting
    assert action.reason.startswith("Restart without node-1 after the script's own next checkpoint")
    assert action.phases[-1].detail == (
        "Waiting for the script's own next checkpoint, expected in 35 steps (18 s): "
        "it saves every 40 steps."
    )
    assert world.state == "running", "nothing has changed yet"
    world.until(lambda: world.state == "recovering")
    assert world.checkpoint_step == 3 * EVERY
    assert world.highest_step == 3 * EVERY, "the step after the checkpoint is finished"
    world.until_running(2)
    action = restart(world)
    assert (action.state, action.resumed_step, action.lost_steps) == ("done", 3 * EVERY, 1)
    assert "node-1" not in world.started_on(2)
    assert not any(isinstance(one.command, ControlRanks) for one in world.commands)


@pytest.mark.parametrize(
    ("resumes", "declared"), [(None, "seen"), (False, "seen"), (True, "no"), (None, "no")]
)
def test_a_script_that_may_not_resume_is_only_proposed_the_wait(
    world: World, resumes: bool | None, declared: str
) -> None:
    world.experience = replace(world.experience, resumes=resumes)
    world.policy = Policy(mode="auto", resumes=declared)  # type: ignore[arg-type]
    world.tick((world.finding(),))
    world.run(60.0)
    action = restart(world)
    assert (action.state, world.generation) == ("proposed", 1)
    assert "not known to resume from its checkpoints" in action.reason
    assert "Price: about 7 steps (4 s) after that checkpoint, expected in " in action.reason
    assert action.price_steps == 7
    world.people(action, "approved")
    world.until(lambda: world.phase() == "wait")
    world.until_running(2)
    assert (world.checkpoint_step or 0) % EVERY == 0


@pytest.mark.parametrize(("mode", "resumes"), [("default", True), ("default", None)])
def test_in_mode_default_a_script_that_resumes_is_repaired_without_a_person(
    world: World, mode: str, resumes: bool | None
) -> None:
    world.policy = Policy(mode=mode)  # type: ignore[arg-type]
    world.experience = replace(world.experience, resumes=resumes)
    world.tick((world.finding(),))
    assert restart(world).state == ("running" if resumes else "proposed")


def test_the_policy_may_declare_that_a_script_resumes(world: World) -> None:
    world.experience = replace(world.experience, resumes=None)
    world.policy = Policy(resumes="yes")
    world.tick((world.finding(),))
    assert restart(world).is_waiting


def test_without_a_checkpoint_for_three_intervals_it_is_proposed_with_its_price(
    world: World,
) -> None:
    world.tick((world.finding(),))
    world.can_save = False
    world.until(lambda: not restart(world).is_waiting, 120.0)
    failed = world.one_action("restart", "failed")
    assert failed.error == (
        "Called off: the script saved no checkpoint within 3 of its usual intervals. "
        "Training continues."
    )
    assert (world.highest_step or 0) - (2 * EVERY + 4) in (3 * EVERY, 3 * EVERY + 1)
    assert (world.state, world.generation) == ("running", 1)
    proposed = world.one_action("restart", "proposed")
    assert proposed.price_steps == (world.highest_step or 0) + 1 - 2 * EVERY
    assert "since the checkpoint of step 80" in proposed.reason


@pytest.mark.parametrize(("mode", "resumes"), [("auto", True), ("auto", None), ("approve", True)])
def test_once_the_script_saves_again_the_proposal_is_to_wait_again(
    world: World, mode: str, resumes: bool | None
) -> None:
    world.policy = Policy(mode="auto", resumes="yes")
    world.tick((world.finding(),))
    world.can_save = False
    world.until(lambda: not restart(world).is_waiting, 120.0)
    assert "since the checkpoint of step 80" in world.one_action("restart", "proposed").reason
    world.policy = Policy(mode=mode)  # type: ignore[arg-type]
    world.experience = replace(world.experience, resumes=resumes)
    world.can_save = True
    world.until(lambda: (world.checkpoint_step or 0) > 2 * EVERY, 60.0)
    world.run(1.0)
    action = restart(world)
    assert action.reason.startswith("Restart without node-1 after the script's own next checkpoint")
    if mode != "auto" or not resumes:
        assert (action.state, world.generation) == ("proposed", 1)
        assert ("not known to resume" in action.reason) is not resumes
        world.people(action, "approved")
    world.until(lambda: world.phase() == "wait")
    world.until_running(2)
    assert restart(world).lost_steps == 1


def test_a_proposal_to_wait_says_that_the_budget_is_used_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tick((world.finding(),))
    world.can_save = False
    world.until(lambda: not restart(world).is_waiting, 120.0)
    monkeypatch.setattr(propose.budget, "refusal", lambda *_: "it had 4 restarts in an hour")
    world.can_save = True
    world.until(lambda: "own next checkpoint" in restart(world).reason, 60.0)
    world.run(5.0)
    assert (restart(world).state, world.generation) == ("proposed", 1)
    assert "Mode auto would not restart: it had 4 restarts in an hour." in restart(world).reason


def test_a_slowdown_before_the_second_checkpoint_waits_for_the_third() -> None:
    world = World(policy=Policy(mode="auto"))
    world.can_checkpoint, world.answers, world.checkpoint_every = False, False, EVERY
    world.experience = Experience(resumes=True)
    world.until_running(1)
    world.until(lambda: world.highest_step == EVERY + 4)
    world.tick((world.finding(),))
    assert restart(world).state == "proposed"
    assert "cannot save a checkpoint on command" in restart(world).reason
    world.until(lambda: world.phase() == "wait", 60.0)
    assert world.checkpoint_step == 2 * EVERY
    assert "A person" not in restart(world).reason
    world.until_running(2)
    assert world.checkpoint_step == 3 * EVERY


def test_its_state_is_in_the_action(world: World) -> None:
    """A server that restarts continues to wait: `decide` keeps nothing between two calls."""
    world.tick((world.finding(),))
    progress = progress_of(restart(world))
    assert (progress.waits, progress.phase) == (True, "wait")
    assert (progress.saved_before, progress.last_step) == (2 * EVERY, 5 * EVERY + 4)


def test_a_person_may_reject_it_during_the_wait(world: World) -> None:
    world.tick((world.finding(),))
    world.people(restart(world), "rejected")
    world.run(60.0)
    assert (world.state, world.generation) == ("running", 1)
    assert restart(world).state == "rejected"


def test_a_crash_during_the_wait_comes_first(world: World) -> None:
    world.tick((world.finding(),))
    waiting = restart(world)
    world.run(2.0)
    world.crash(6)
    world.until_running(2)
    assert world.actions[waiting.action_id].state == "superseded"
    assert restart(world).action_id != waiting.action_id
    assert not world.open_incidents()


def test_a_hang_during_the_wait_keeps_its_patience(world: World) -> None:
    world.tick((world.finding(),))
    waiting = restart(world)
    hang = world.finding("hang", cause="unknown", severity="critical", fingerprint="hang/1", rank=1)
    world.detects = False
    world.hang(1)
    world.tick((hang,))
    world.run(8.0)
    assert world.actions[waiting.action_id].is_waiting
    world.until_running(2)
    assert world.actions[waiting.action_id].state == "superseded"


def test_the_wait_ends_with_its_incident(world: World) -> None:
    world.tick((world.finding(),))
    world.tick((world.finding(cleared=True, summary="It is over."),))
    assert restart(world).state == "superseded"
    world.run(60.0)
    assert (world.state, world.generation) == ("running", 1)


def test_the_wait_ends_if_no_node_can_take_over_any_more(world: World) -> None:
    world.tick((world.finding(),))
    world.nodes["node-4"].quarantined = True
    world.run(60.0)
    assert restart(world).state == "superseded"
    assert "no more nodes may be quarantined" in str(restart(world).error).lower()
    assert (world.state, world.generation) == ("running", 1)


def test_other_incidents_of_the_wait_are_repaired_by_the_same_restart(world: World) -> None:
    world.tick((world.finding(),))
    other = world.finding(rank=7, node="node-3", summary="Rank 7 is slow.", suspects_node=False)
    world.run(1.0, (other,))
    assert len(world.open_incidents()) == 2
    assert len(world.restart_actions()) == 1
    world.until_running(2)
    assert not world.open_incidents()


def test_a_script_that_saves_too_often_to_be_stopped_between_saves_needs_a_person() -> None:
    world = World(policy=Policy(mode="auto", resumes="yes"))
    world.can_checkpoint, world.answers, world.checkpoint_every = False, False, 10
    world.until_running(1)
    world.run(30.0)
    world.tick((world.finding(),))
    action = restart(world)
    assert action.state == "proposed"
    assert "cannot save a checkpoint on command" in action.reason


def test_steps_that_are_made_until_an_asynchronous_checkpoint_is_complete_are_in_the_price(
    world: World,
) -> None:
    world.policy = Policy(mode="approve")
    world.experience = replace(world.experience, checkpoint_saving_steps=20)
    world.tick((world.finding(),))
    assert "Price: about 27 steps (14 s) after that checkpoint" in restart(world).reason


def test_asynchronous_checkpoints_without_a_pause_between_them_are_not_waited_for(
    world: World,
) -> None:
    world.experience = replace(world.experience, checkpoint_saving_steps=EVERY - 6)
    world.tick((world.finding(),))
    action = restart(world)
    assert action.state == "proposed"
    assert "since the checkpoint of step 80" in action.reason


def test_it_is_not_stopped_while_the_next_save_is_about_to_begin(world: World) -> None:
    """The ranks learn of the checkpoint late: the next save would be hit by the stop."""
    world.tick((world.finding(),))
    hidden = world.view

    def late() -> object:
        view = hidden()
        is_late = (world.highest_step or 0) < 4 * EVERY - 2
        return replace(view, checkpoint_step=2 * EVERY) if is_late else view

    world.view = late  # type: ignore[assignment, method-assign]
    world.until(lambda: world.state == "recovering", 90.0)
    assert world.highest_step == 4 * EVERY
    assert world.checkpoint_step == 4 * EVERY


@pytest.mark.parametrize("resumes", [True, False])
def test_a_restart_shows_whether_the_script_resumes(resumes: bool) -> None:
    world = World(policy=Policy(mode="auto"))
    world.can_checkpoint, world.resumes = False, resumes
    world.until_running(1)
    world.until(lambda: world.highest_step == 25)
    assert world.experience.resumes is None
    world.crash(6)
    world.until_running(2)
    assert world.experience.resumes is resumes


def test_a_restart_without_a_known_checkpoint_shows_nothing() -> None:
    world = World(policy=Policy(mode="auto"))
    world.can_save = False
    world.until_running(1)
    world.run(5.0)
    world.crash(6)
    world.until_running(2)
    assert world.experience.resumes is None


def test_steps_counted_from_zero_after_a_restart_do_not_confuse_the_wait(world: World) -> None:
    """A script that does not number its steps is at step 0 again; it declares that it resumes."""
    world.policy = Policy(mode="auto", resumes="yes")
    world.resumes = False
    world.crash(6)
    world.until_running(2)
    world.until(lambda: world.checkpoint_step == EVERY and world.ranks[0].step == EVERY + 3)
    assert (world.highest_step or 0) > 2 * EVERY
    world.tick((world.finding(node=world.home(2)),))
    assert restart(world).is_waiting
    world.until_running(3)
    assert restart(world).state == "done"


def crash_after(world: World, steps: int, generation: int) -> None:
    """Crash rank 6 once the generation has finished so many steps; wait for what follows."""
    world.until(lambda: world.ranks[0].step == steps)
    world.crash(6)
    world.until(lambda: world.generation == generation + 1 or world.state == "failed", 120.0)


@pytest.mark.parametrize(("steps", "is_given_up"), [(EVERY + 3, False), (EVERY - 3, True)])
def test_a_checkpoint_is_progress_of_a_script_that_counts_from_zero(
    world: World, steps: int, is_given_up: bool
) -> None:
    world.policy = Policy(mode="auto", resumes="yes", quarantine_share=0.0)
    world.resumes = False
    for generation in range(1, 6):
        if world.state != "failed":
            crash_after(world, 2 * EVERY + 5 if generation == 1 else steps, generation)
    assert (world.state == "failed") is is_given_up
    assert len(world.restarts) == (3 if is_given_up else 5)


@pytest.mark.parametrize(("declared", "resumes"), [("seen", False), ("yes", True)])
def test_a_checkpoint_is_no_progress_of_a_script_that_may_not_resume_or_numbers_its_steps(
    world: World, declared: str, resumes: bool
) -> None:
    world.policy = Policy(mode="auto", resumes=declared, quarantine_share=0.0)  # type: ignore[arg-type]
    world.resumes = resumes
    for generation in range(1, 6):
        if world.state != "failed":
            world.can_save = generation == 1 or not resumes
            counts_on = resumes or generation == 1
            crash_after(world, (2 if counts_on else 1) * EVERY + 5, generation)
    assert world.state == "failed"
    assert "the last 3 restarts made no progress" in world.one_action("stop").reason
