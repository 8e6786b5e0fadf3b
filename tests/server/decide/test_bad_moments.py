"""Faults during a repair."""

from __future__ import annotations

import pytest

from paceline_server.policy import Policy
from paceline_wire.commands import StopGeneration
from paceline_wire.topology import Topology

from .simulator import Node, World


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


def test_a_training_that_ends_before_the_checkpoint_is_not_stopped(world: World) -> None:
    """The first rank is done; the others may still write their results."""
    world.tick((world.finding(),))
    world.tick()
    world.crash(7, exit_code=0)
    world.run(3.0)
    assert world.phase() == "cancel"
    for rank in range(7):
        world.crash(rank, exit_code=0)
    world.until(lambda: world.state == "finished")
    assert world.one_action("restart").state == "superseded"
    assert not world.restarts


def test_a_rank_that_saved_and_then_crashed_has_saved(world: World) -> None:
    world.tick((world.finding(),))
    world.until(lambda: bool(world.acknowledged))
    assert {one.status for one in world.acknowledged} == {"done"}
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0


@pytest.mark.parametrize("phase", ["start", "observe"])
def test_a_crash_during_the_start_leads_to_the_next_generation(world: World, phase: str) -> None:
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


def test_a_node_that_fails_to_start_is_replaced(world: World) -> None:
    world.nodes["node-3"].fails_to_start = True
    world.crash(0)
    world.until_running(3)
    assert world.home(6) == "node-4"
    assert not world.quarantined, "once may be chance"
    reasons = [action.reason for action in world.actions.values() if action.kind == "restart"]
    assert reasons[-1].startswith("Restart if possible not on node-3: node-3 could not start")


def test_a_node_that_fails_to_start_twice_is_excluded(world: World) -> None:
    world.lose("node-4")
    world.run(6.0)
    world.nodes["node-3"].fails_to_start = True
    world.crash(0)
    world.until_running(4)
    assert world.topology.dp == 1, "there is no other node"
    assert list(world.quarantined) == ["node-3"]


def _hang_at_start(world: World) -> None:
    """Let generation 2 fail to start, without a report from a detector."""
    world.detects = False
    world.crash(3)
    world.tick((world._fatal("failure", "killed by signal 9", 3, "node-1"),))
    world.until(lambda: world.generation == 2)
    world.tick()
    world.tick()
    world.hang(1)


def test_a_start_that_times_out_is_repeated(world: World) -> None:
    world.policy = Policy(start_timeout_seconds=10.0)
    _hang_at_start(world)
    world.until_running(3)
    failed = world.one_action("restart", "failed")
    assert "did not finish a step in time" in (failed.error or "")


def test_a_node_that_does_not_confirm_the_stop_is_quarantined(
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


def test_a_node_that_returns_gets_no_ranks_before_it_confirms(world: World) -> None:
    zombies = list(world.nodes["node-2"].processes)
    world.lose("node-4")
    world.lose("node-2")
    world.nodes["node-0"].slots = 1  # the job fits nowhere else
    world.spec = world.spec.__class__(name="gpt", argv=["train"], topology=Topology(1, 4, 2))
    world.run(8.0)
    assert world.phase() == "place"
    assert "Waiting for nodes" in world.one_action("restart").phases[-1].detail
    world.nodes["node-2"].processes = zombies  # the node was only cut off
    world.nodes["node-2"].connected = True
    world.nodes["node-0"].slots = 2
    world.until_running(2)
    assert "node-2" in world.started_on(2)


def test_results_of_other_commands_and_repeated_results_are_ignored(world: World) -> None:
    world.tick((world.finding(),))
    old = [type(one)(one.rank, 1, "done", 3) for one in world.acknowledged]
    world.acknowledged += [*old, *old]
    world.until(lambda: world.phase() != "checkpoint")
    world.acknowledged *= 2
    world.until_running(2)
    assert world.one_action("restart").lost_steps == 0


def test_no_node_counts_as_lost_while_all_are_silent(world: World) -> None:
    """The server itself was suspended."""
    world.detects = False
    world.crash(3)
    world.tick((world._fatal("failure", "killed by signal 9", 3, "node-1"),))
    world.until(lambda: world.phase() == "observe")
    world.now_ns += 30 * 1_000_000_000
    world.server_is_asleep = True
    world.run(1.0)
    world.server_is_asleep = False
    world.until_running(2)
    assert len(world.restarts) == 1


def test_a_node_that_returns_with_old_ranks_gets_none_before_they_are_dead(
    world: World,
) -> None:
    world.nodes["node-0"].obeys_stop = False
    world.crash(0)
    world.run(1.0)
    world.nodes["node-0"].connected = False
    world.until_running(2)
    assert "node-0" not in world.started_on(2)
    assert world.nodes["node-0"].processes, "of generation 1"
    _well_again(world.nodes["node-0"])
    world.run(1.0)
    world.lose("node-1")
    world.until_running(3)  # the simulator fails if two generations run on a node
    assert "node-0" in world.started_on(3)


def _well_again(node: Node) -> None:
    """Let the node respond and confirm, and let a person release it."""
    node.connected = node.obeys_stop = True
    node.quarantined = False


def test_a_node_that_returns_during_placement_has_to_confirm_first(world: World) -> None:
    world.nodes["node-0"].obeys_stop = False
    world.crash(0)
    world.run(1.0)
    world.nodes["node-0"].connected = False
    world.until_running(2)
    for name in ("node-1", "node-2", "node-3"):
        world.lose(name)
    world.until(lambda: world.phase() == "place")
    _well_again(world.nodes["node-0"])
    world.until_running(3)
    assert world.started_on(3) == {"node-0", "node-4"}


def test_an_unresponsive_spare_delays_a_restart_only_briefly(world: World) -> None:
    world.nodes["node-4"].obeys_stop = False
    world.crash(3)
    assert world.until(lambda: bool(world.started_on(2)), seconds=10.0) < 5.0
    assert "node-4" not in world.started_on(2)
    assert not world.nodes["node-4"].quarantined, "nothing shows that it runs ranks of the job"


def test_unconfirmed_nodes_are_asked_again_while_nodes_are_missing(world: World) -> None:
    world.nodes["node-1"].obeys_stop = world.nodes["node-3"].obeys_stop = False
    world.crash(0)
    for name in ("node-0", "node-2"):
        world.lose(name)
    world.until(lambda: world.phase() == "place")
    _well_again(world.nodes["node-1"])
    _well_again(world.nodes["node-3"])
    world.until_running(2, seconds=120.0)
    assert world.started_on(2) == {"node-1", "node-3"}
    asked = [one for one in world.commands if isinstance(one.command, StopGeneration)]
    assert len(asked) < 20, "not at every tick"


def test_a_node_lost_during_the_stop_is_used_if_there_is_no_other(
    world: World,
) -> None:
    for name in ("node-1", "node-2", "node-3"):
        world.nodes[name].obeys_stop = False
    world.crash(0)
    world.run(1.0)
    world.nodes["node-0"].connected = False
    world.run(10.0)
    world.nodes["node-0"].connected = True
    world.until_running(2)
    assert world.started_on(2) == {"node-0", "node-4"}


def test_a_start_may_take_minutes(world: World) -> None:
    """A large job loads its checkpoint, compiles, and sets up NCCL."""
    _hang_at_start(world)
    world.run(600.0)
    assert world.one_action("restart").state == "running"
    for process in world.processes():
        process.hung = False
    world.until_running(2, seconds=5.0)


def test_nodes_that_an_earlier_restart_lost_are_used_once_released(world: World) -> None:
    world.nodes["node-2"].fails_to_start = True
    for name, seconds in (("node-3", 4.0), ("node-0", 0.1), ("node-1", 20.0)):
        world.nodes[name].connected = False
        world.run(seconds)
    assert world.started_on(2) == {"node-2", "node-4"}
    assert world.quarantined["node-1"] == "node-1: node lost."
    world.until(lambda: "Waiting for nodes" in world.story(), 120.0)
    for name in ("node-0", "node-1", "node-3"):
        world.nodes[name].connected = True
    world.run(30.0)
    assert world.state == "recovering", "a person has released none"
    world.nodes["node-1"].quarantined = False
    world.until(lambda: world.state == "running", 120.0)
    assert world.started_on(world.generation) == {"node-1", "node-4"}


def test_a_job_continues_when_all_its_nodes_were_away_for_longer_than_their_leases(
    world: World,
) -> None:
    for name, seconds in (("node-1", 0.1), ("node-0", 0.1), ("node-2", 1.0), ("node-3", 0.1)):
        world.nodes[name].connected = False
        world.run(seconds)
    world.now_ns += 6_000_000_000  # the server was paused
    world.until(lambda: "Waiting for nodes" in world.story(), 120.0)
    for node in world.nodes.values():
        node.connected = True
    world.until(lambda: world.state == "running", 120.0)


def test_deadlines_do_not_wait_until_a_clock_that_was_set_back_has_caught_up(world: World) -> None:
    world.crash(3)
    world.nodes["node-1"].obeys_stop = False
    world.until(lambda: world.phase() == "stop")
    world.run(1.0)
    world.now_ns -= 600 * 10**9
    world.until_running(2)
    assert world.nodes["node-1"].quarantined
