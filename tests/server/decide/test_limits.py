"""Missing nodes and exhausted restart budgets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.policy import Policy
from paceline_wire.topology import Topology

from .simulator import World


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
    world.nodes["node-1"].connected = world.nodes["node-4"].connected = True
    for node in world.nodes.values():
        node.quarantined = False
    world.run(1.0)
    world.run(5.0)
    world.crash(0)
    world.until_running(3)
    assert world.topology == Topology(2, 2, 2)


def test_a_job_does_not_shrink_if_it_would_be_slower_than_with_its_straggler(
    world: World,
) -> None:
    world.lose("node-4")
    world.run(6.0)
    world.run(5.0, (world.finding(slowdown=1.3, cost_ratio=0.2),))
    assert world.generation == 1
    assert "even slower" in world.one_action("notify").reason


def test_without_nodes_the_job_waits_and_continues_when_one_returns() -> None:
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


def test_a_job_that_crashes_at_every_start_is_given_up_after_three_restarts(
    world: World,
) -> None:
    for node in world.nodes.values():
        node.crashes_at_start = 100
    world.policy = Policy(quarantine_share=0.0)
    world.crash(0)
    world.until(lambda: world.state == "failed", seconds=120)
    assert len(world.restarts) == 3
    assert "the last 3 restarts made no progress" in world.one_action("stop").reason
    assert not world.processes()
    starts_ns = [one.at_ns for one in world.restarts]
    assert starts_ns[1] - starts_ns[0] >= 1.0e9
    assert starts_ns[2] - starts_ns[1] >= 2.0e9
    [incident] = world.open_incidents()
    assert incident.state == "open"


def test_a_job_that_cannot_start_at_all_is_given_up() -> None:
    world = World(policy=Policy(quarantine_share=0.0))
    for node in world.nodes.values():
        node.crashes_at_start = 100
    world.until(lambda: world.state == "failed", seconds=120)
    assert len(world.restarts) == 3


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(restarts_per_hour=2, checkpoint_timeout_seconds=9), "within the last hour"),
        (Policy(restarts_per_hour=99, restarts_per_day=2), "within the last day"),
    ],
)
def test_the_restart_budget_ends_the_job(world: World, policy: Policy, reason: str) -> None:
    world.policy = policy
    for generation in (2, 3):
        world.crash(0)
        world.until_running(generation)
        world.run(10.0)
    world.crash(0)
    world.until(lambda: world.state == "failed")
    assert reason in world.one_action("stop").reason


def test_a_spent_budget_does_not_stop_a_job_that_is_merely_slow(world: World) -> None:
    world.policy = Policy(restarts_per_hour=0)
    world.run(5.0, (world.finding(),))
    assert world.state == "running"
    assert "not restarted for it" in world.one_action("notify").reason


def test_a_spent_budget_does_not_stop_a_job_whose_ranks_still_train(world: World) -> None:
    world.policy = Policy(mode="auto", restarts_per_hour=0)
    world.detects = False
    found = world.finding("corruption", cause="silent corruption", severity="critical")
    world.run(5.0, (replace(found, onset_step=12, suspects_node=True),))
    action = world.one_action("restart")
    assert (world.state, action.state) == ("running", "proposed")
    assert "Mode auto would not restart: 0 restarts within the last hour" in action.reason


def test_a_spent_budget_does_not_stop_a_job_whose_loss_diverges(world: World) -> None:
    world.policy = Policy(mode="auto", restarts_per_hour=0, loss_rollback="auto")
    world.spec = replace(world.spec, metadata={"roll_back": "yes"})
    world.detects = False
    found = world.finding("loss", cause="divergence of the loss", severity="critical")
    found = replace(found, rank=None, node=None, suspects_node=False, onset_step=12)
    world.run(5.0, (found,))
    assert world.state == "running"
    assert "not restarted for it" in world.one_action("notify").reason


def test_the_budget_recovers_with_time(world: World) -> None:
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
