"""The modes observe, dry-run, approve and auto."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.policy import Policy

from .simulator import SECOND, World

DAY_NS = 86_400 * SECOND


def test_observe_takes_no_action(world: World) -> None:
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
    world.run(1.0, (world.finding(severity="info"),))
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    assert world.state == "failed"
    kinds = [incident.finding.kind for incident in world.open_incidents()]
    assert kinds == ["failure"], "only what explains the end"


@pytest.mark.parametrize("is_explained", [True, False])
def test_the_end_of_a_job_waits_for_its_cause_but_not_forever(
    world: World, is_explained: bool
) -> None:
    world.policy = Policy(mode="observe")
    world.detects = False
    world.run(1.0, (world.finding(severity="critical"),))
    world.ranks = [replace(rank, state="exited") for rank in world.ranks]
    world.ended_received_ns = world.now_ns
    world.run(2.0)
    assert world.state == "running", "the straggler does not explain it"
    if is_explained:
        world.run(0.5, (world.finding(kind="failure", severity="critical"),))
    else:
        world.run(7.0)
    assert world.state == "failed"


def test_the_end_of_a_job_waits_for_a_correction_of_its_cause(world: World) -> None:
    """The last exits may show that all ranks were killed, and not only the first one."""
    world.policy = Policy(mode="observe")
    world.detects = False
    world.run(1.0, (world.finding(kind="failure", severity="critical", ranks=[0]),))
    world.ranks = [replace(rank, state="exited") for rank in world.ranks]
    world.ended_received_ns = world.now_ns
    world.run(0.9)
    assert world.state == "running"
    everybody = world.finding(kind="failure", severity="critical", ranks=[*range(8)])
    world.run(0.5, (everybody,))
    assert world.state == "failed"
    assert [len(one.finding.ranks) for one in world.open_incidents()] == [8]


def test_observe_calls_a_job_failed_when_its_nodes_are_gone_for_good(world: World) -> None:
    world.policy = Policy(mode="observe")
    lost = [node for node in world.nodes if node in world.started_on(1)]
    for node in lost[1:]:
        world.lose(node)
    world.now_ns += DAY_NS
    world.run(1.0)
    assert world.state == "running", "one of its nodes still reports"
    world.lose(lost[0])
    world.now_ns += DAY_NS - 10 * SECOND
    world.run(1.0)
    assert world.state == "running"
    world.run(10.0)
    assert world.state == "failed"
    assert not world.open_incidents()


def test_dry_run_records_once_what_it_would_do(world: World) -> None:
    world.policy = Policy(mode="dry-run")
    world.run(10.0, (world.finding(),))
    action = world.one_action("restart")
    assert action.state == "superseded"
    assert action.reason.startswith("Dry run, not done: Checkpoint and restart without node-1")
    assert world.generation == 1
    assert world.state == "running"


def test_a_proposal_shows_the_figures_of_its_incident(world: World) -> None:
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


def test_a_rejected_restart_ends_the_job_when_all_ranks_are_dead(
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
