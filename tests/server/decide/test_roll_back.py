"""Going back to a checkpoint before the loss went wrong."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy
from paceline_wire.commands import StartRanks

from .simulator import World


def nan(world: World, onset: int | None = None) -> Finding:
    found = world._fatal("failure", "non-finite loss", None, "node-1")
    found = replace(found, node=None, onset_step=onset or world.highest_step, step=onset)
    return replace(found, fingerprint="failure:loss", summary="The loss is nan at step 20.")


def divergence(world: World) -> Finding:
    found = world.finding("loss", cause="divergence of the loss", severity="critical")
    changes = {"rank": None, "node": None, "suspects_node": False, "cost_ratio": None}
    return replace(found, onset_step=12, slowdown=None, **changes)  # type: ignore[arg-type]


@pytest.fixture
def able(world: World) -> World:
    """A job whose script goes back on request."""
    world.spec = replace(world.spec, metadata={"roll_back": "yes"})
    world.detects = False
    return world


def environment(world: World) -> dict[str, str]:
    """Return the environment of the ranks of the current generation."""
    [found] = {
        tuple(sorted(one.command.environment.items()))
        for one in world.commands
        if isinstance(one.command, StartRanks) and one.command.generation == world.generation
    }
    return dict(found)


def test_a_nan_goes_back_before_it_and_a_later_crash_does_not_undo_it(able: World) -> None:
    able.policy = Policy(mode="auto", loss_skip_steps=4)
    able.tick((nan(able, 15),))
    able.until_running(2)
    action = able.one_action("restart")
    assert "from a checkpoint before step 15" in action.reason
    expected = {
        "PACELINE_ROLL_BACK": f"14:{action.action_id}",
        "PACELINE_SKIP_STEPS": "14:18",
    }
    assert environment(able) == expected
    able.detects = True
    able.crash(3)
    able.until_running(3)
    assert environment(able) == expected


def test_a_script_that_goes_back_on_request_is_not_one_that_does_not_resume(able: World) -> None:
    able.policy = Policy(mode="auto")
    able.until(lambda: able.checkpoint_step == 20)
    able.tick((nan(able, 15),))
    able.until(lambda: able.generation == 2)
    able._completed = 10  # it loads the checkpoint before
    able.until_running(2)
    assert able.one_action("restart").resumed_step == 10
    assert able.experience.resumes is None


def test_after_two_tries_the_job_ends_with_the_evidence(able: World) -> None:
    able.policy = Policy(mode="auto")
    for generation in (2, 3):
        able.tick((nan(able, 15 + generation),))
        able.until_running(generation)
        able.run(15.0)
    able.tick((nan(able, 20),))
    able.until(lambda: able.state == "failed")
    reason = able.one_action("stop").reason
    assert reason.startswith("Gave up: The loss is nan at step 20. The job went back before step")
    assert "then before step 18" in reason


def test_a_place_far_away_has_its_own_tries(able: World) -> None:
    able.policy = Policy(mode="auto", loss_tries=1)
    able.tick((nan(able, 15),))
    able.until_running(2)
    able.run(10.0)
    able.tick((nan(able, 2_000),))
    able.until_running(3)


def test_without_mode_auto_the_second_failure_is_only_reported(able: World) -> None:
    able.policy = Policy(mode="approve", loss_tries=0)
    able.tick((nan(able, 15),))
    able.run(5.0)
    assert able.state == "running"
    assert able.one_action("notify").state == "done"


def test_a_divergence_is_proposed_also_in_mode_auto(able: World) -> None:
    able.policy = Policy(mode="auto")
    able.run(5.0, (divergence(able),))
    action = able.one_action("restart")
    assert action.state == "proposed"
    assert "A person has to approve it (policy `loss_rollback`)" in action.reason
    assert "those between the checkpoint and that step" in action.reason
    assert able.generation == 1
    able.people(action, "approved")
    able.until_running(2)
    assert environment(able)["PACELINE_ROLL_BACK"] == f"11:{action.action_id}"


@pytest.mark.parametrize(
    ("rollback", "acts", "notifies"), [("auto", True, False), ("off", False, True)]
)
def test_the_policy_decides_about_a_divergence(
    able: World, rollback: str, acts: bool, notifies: bool
) -> None:
    able.policy = Policy(mode="auto", loss_rollback=rollback)  # type: ignore[arg-type]
    able.run(20.0, (divergence(able),))
    assert (able.generation == 2) == acts
    assert any(one.kind == "notify" for one in able.actions.values()) == notifies


def test_a_script_that_cannot_go_back_is_restarted_for_a_nan_and_not_for_a_divergence(
    world: World,
) -> None:
    world.detects = False
    world.policy = Policy(mode="auto", loss_rollback="auto")
    world.run(5.0, (divergence(world),))
    assert world.generation == 1
    assert "cannot go back by itself" in world.one_action("notify").reason
    world.tick((nan(world),))
    world.until_running(2)
    assert environment(world) == {}


def test_a_spike_alone_causes_no_action(able: World) -> None:
    able.policy = Policy(mode="auto", loss_rollback="auto")
    able.run(5.0, (replace(divergence(able), severity="info", cause="loss spike"),))
    assert not [one for one in able.actions.values() if one.kind != "start"]


def corruption(world: World, **changes: object) -> Finding:
    found = world.finding("corruption", cause="silent corruption", severity="critical")
    values = {"onset_step": 12, "suspects_node": True, "slowdown": None, "cost_ratio": None}
    return replace(found, **{**values, **changes})  # type: ignore[arg-type]


def test_a_wrong_replica_is_proposed_to_be_drained_and_left_behind(able: World) -> None:
    able.policy = Policy(mode="auto")
    able.run(5.0, (corruption(able),))
    action = able.one_action("restart")
    assert (action.state, action.exclude_nodes) == ("proposed", ["node-1"])
    assert able.generation == 1
    able.people(action, "approved")
    able.until_running(2)
    assert "node-1" in able.quarantined
    assert environment(able)["PACELINE_ROLL_BACK"].startswith("11:")


def test_of_two_replicas_that_differ_no_node_is_drained(able: World) -> None:
    able.policy = Policy(mode="auto")
    able.run(5.0, (corruption(able, rank=None, node=None, suspects_node=False),))
    assert "is not known" in able.one_action("notify").reason
    assert not able.quarantined
