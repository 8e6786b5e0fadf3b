"""A healthy job from its start to its end."""

from __future__ import annotations

from paceline_wire.commands import StartRanks, TakeProfiles

from .simulator import World


def test_a_job_starts_on_the_first_nodes_in_blocks() -> None:
    world = World(nodes=12)
    world.until_running(1)
    assert [world.home(rank) for rank in range(8)] == [f"node-{rank // 2}" for rank in range(8)]
    starts = [one.command for one in world.commands if isinstance(one.command, StartRanks)]
    assert {(one.master_address, one.master_port) for one in starts} == {("10.0.0.0", 29500)}
    assert world.one_action("start").state == "done"
    assert not world.restarts


def test_a_job_waits_until_there_are_slots_for_all_ranks() -> None:
    world = World()
    for index in (2, 3):
        world.nodes[f"node-{index}"].connected = False
    world.run(8.0)
    assert world.state == "pending"
    assert not world.actions
    world.nodes["node-2"].connected = True
    world.until_running(1)
    assert world.started_on(1) == {"node-0", "node-1", "node-2", "node-4"}


def test_a_healthy_job_is_left_alone(world: World) -> None:
    commands = len(world.commands)
    world.run(60.0)
    later = [issued.command for issued in world.commands[commands:]]
    assert all(isinstance(command, TakeProfiles) for command in later), "ranks are not touched"
    assert not world.incidents
    assert world.decisions[-1].state is None


def test_a_job_whose_ranks_all_exit_cleanly_is_finished() -> None:
    world = World(last_step=5)
    world.until(lambda: world.state == "finished")
    assert not world.incidents


def test_a_person_stops_the_job(world: World) -> None:
    world.stop_requested = True
    world.until(lambda: world.state == "stopped")
    assert not world.processes()
    assert world.one_action("stop").state == "done"


def test_a_pending_job_is_stopped_immediately() -> None:
    world = World(nodes=1)
    world.stop_requested = True
    world.tick()
    assert world.state == "stopped"
    assert not world.commands


def test_a_stop_in_the_middle_of_a_restart_supersedes_it(world: World) -> None:
    world.crash(3)
    world.until(lambda: world.phase() == "start")
    world.stop_requested = True
    world.until(lambda: world.state == "stopped")
    assert world.one_action("restart").state == "superseded"
    assert not world.processes()


def test_a_stop_that_is_never_confirmed_names_the_node(world: World) -> None:
    world.nodes["node-2"].obeys_stop = False
    world.stop_requested = True
    world.until(lambda: world.state == "stopped", seconds=90)
    action = world.one_action("stop")
    assert action.state == "failed"
    assert "node-2" in (action.error or "")
