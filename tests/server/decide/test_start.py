"""A start that cannot succeed ends the job; one that merely cannot be observed continues."""

from __future__ import annotations

import pytest

from paceline_server.policy import Policy
from paceline_wire.commands import StopGeneration
from paceline_wire.topology import Topology

from .simulator import World

MODES = ["observe", "dry-run"]


@pytest.mark.parametrize("mode", MODES)
def test_a_command_that_cannot_be_started_ends_the_job_and_frees_its_nodes(mode: str) -> None:
    world = World(policy=Policy(mode=mode))  # type: ignore[arg-type]
    for node in world.nodes.values():
        node.fails_to_start = True
    world.until(lambda: world.state == "failed", 120.0)
    reason = "The start failed: node-0 could not start its ranks: rank 0: no such file."
    assert world.one_action("stop").reason == reason
    assert not world.processes()


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_exits_before_its_first_step_ends_the_start(mode: str) -> None:
    world = World(policy=Policy(mode=mode))  # type: ignore[arg-type]
    world.nodes["node-0"].crashes_at_start = 1
    world.until(lambda: world.state == "failed", 120.0)
    assert not world.processes(), "its peers would wait for it forever"


@pytest.mark.parametrize("step_seconds", [0.5, 40.0])
def test_a_rank_without_steps_does_not_end_a_start_or_a_restart(step_seconds: float) -> None:
    """Rank 3 generates what the others train with."""
    seconds = 120.0
    world = World(step_seconds=step_seconds, policy=Policy(start_timeout_seconds=seconds))
    world.stepless = {3}
    world.until(lambda: world.state == "running", seconds + 1.0)
    world.run(seconds)
    assert (world.state, world.generation) == ("running", 1)
    world.crash(5)
    world.until(lambda: world.generation == 2, 60.0)
    world.until(lambda: world.state == "running", seconds + 1.0)
    world.run(seconds)
    assert (world.state, world.generation) == ("running", 2)


def test_a_rank_that_hangs_at_the_start_while_the_others_finish_a_step_ends_it() -> None:
    world = World(policy=Policy(start_timeout_seconds=120.0))
    world.stepless = {3}
    world.until(lambda: world.highest_step is not None)
    world.detects = False
    world.hang(3)
    world.until(lambda: world.generation == 2, world.policy.start_timeout_seconds + 60.0)
    audit = " ".join(f"{entry.verb} {entry.detail}" for entry in world.audit)
    assert "Ranks 3 did not finish a step in time." in audit


def test_a_start_that_failed_on_one_node_is_repeated_on_another() -> None:
    """An example is a spare without the shared mount: the whole job fits without it."""
    world = World()
    world.until_running(1)
    world.nodes["node-4"].crashes_at_start = 100
    world.lose("node-1")
    world.nodes["node-5"] = type(world.nodes["node-0"])("node-5")
    world.until_running(3)
    assert "node-4" in world.started_on(2)
    assert world.started_on(3) == {"node-0", "node-2", "node-3", "node-5"}
    assert not world.nodes["node-4"].quarantined, "once may be chance"


def test_a_second_failed_start_quarantines_the_node_beside_a_lost_one() -> None:
    world = World()
    world.until_running(1)
    world.nodes["node-4"].crashes_at_start = 100
    world.lose("node-1")
    world.until(lambda: world.nodes["node-4"].quarantined, 60.0)
    world.until(lambda: world.state == "running", 60.0)
    assert world.topology == Topology(1, 2, 2), "no other node is left"


@pytest.mark.parametrize("mode", ["auto", "default"])
@pytest.mark.parametrize("fault", [{"fails_to_start": True}, {"crashes_at_start": 100}])
def test_a_command_that_starts_nowhere_puts_no_node_aside(
    mode: str, fault: dict[str, object]
) -> None:
    world = World(policy=Policy(mode=mode))  # type: ignore[arg-type]
    for node in world.nodes.values():
        for name, value in fault.items():
            setattr(node, name, value)
    world.until(lambda: world.state == "failed", 600.0)
    assert not world.quarantined


@pytest.mark.parametrize("mode", [*MODES, "approve", "auto", "default"])
def test_processes_that_run_and_report_nothing_are_never_killed(mode: str) -> None:
    world = World(policy=Policy(mode=mode, start_timeout_seconds=10.0))  # type: ignore[arg-type]
    world.detects = False
    world.step_seconds = 1e9  # no step is ever reported
    world.run(60.0)
    assert (world.state, world.generation) == ("running", 1)
    assert not any(isinstance(one.command, StopGeneration) for one in world.commands)
    assert "training is not observed" in world.one_action("start").phases[-1].detail


@pytest.mark.parametrize("explained", [True, False])
def test_the_rank_that_failed_is_to_blame_and_not_a_peer_that_ended_before_it(
    explained: bool,
) -> None:
    world = World()
    world.until_running(1)
    world.detects = False
    world.crash(3)
    world.tick((world._fatal("failure", "killed by signal 9", 3, "node-1"),))
    world.step_seconds = 1e9
    world.until(lambda: world.phase() == "observe")
    world.crash(0, exit_code=1)  # it lost its connection
    world.run(1.0)
    assert world.one_action("restart").state == "running"
    world.crash(6, exit_code=1)
    if explained:
        world.tick((world._fatal("failure", "missing mount", 6, "node-3"),))
    else:
        world.run(2.0)
    failed, following = world.restart_actions()
    assert failed.state == "failed"
    if explained:
        assert failed.error == "Rank 6: missing mount. It had finished no step."
    else:
        assert failed.error == "Rank 0 (node-0) exited with code 1 before its first step."
    avoids_nodes = "if possible not on node-3" in following.reason
    assert avoids_nodes == explained, "else nothing shows whose fault it is"


def test_a_rank_that_dies_before_the_first_steps_are_seen_is_no_failed_start() -> None:
    """A server that is behind sees both at once: the node would be avoided, of one node forever."""
    world = World()
    world.until_running(1)
    world.crash(3)
    world.until(lambda: world.phase() == "observe")
    for rank in range(8):
        world._set(rank, step=20)
    world.crash(3)
    world.tick()
    assert world.restart_actions()[0].state == "done"
    world.until_running(3)
    assert [one.state for one in world.restart_actions()] == ["done", "done"]
    assert "not on" not in world.restart_actions()[1].reason
