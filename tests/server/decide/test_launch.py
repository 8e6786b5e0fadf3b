"""A job that a launcher owns is repaired through the launcher, by requests that are committed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.progress import progress_of
from paceline_server.decide.types import (
    Decision,
    JobView,
    LaunchKind,
    LaunchRequest,
    LaunchResult,
    LaunchState,
    RankView,
    Restarted,
)
from paceline_server.engine.types import Launch
from paceline_server.policy import Policy
from paceline_wire.commands import ControlRanks

from .simulator import Process, World


class LaunchedWorld(World):
    """A job whose ranks Slurm started: only their launcher restarts them."""

    def __init__(self, mode: str = "auto") -> None:
        super().__init__(policy=Policy(mode=mode))  # type: ignore[arg-type]
        self.launch: Launch | None = None
        self.requests: list[LaunchRequest] = []
        self.answers_of_launcher: dict[tuple[str, LaunchKind], LaunchResult] = {}
        self.is_superseded = False
        self.withdrawn: list[str] = []
        self.until_running(1)
        self.run(10.0)
        self.commands.clear()
        nodes = {agent: f"slurm-{agent}" for agent in {rank.agent_id for rank in self.ranks}}
        self.launch = Launch(launcher="slurm", job="7", restarts=0, nodes=nodes)

    def view(self) -> JobView:
        return replace(
            super().view(),
            is_external=True,
            launch=self.launch,
            launch_results={
                **{(one.action_id, one.kind): LaunchResult() for one in self.requests},
                **self.answers_of_launcher,
            },
            is_superseded=self.is_superseded,
        )

    def _apply(self, decision: Decision) -> None:
        super()._apply(decision)
        self.requests += decision.launch_requests
        self.withdrawn += decision.withdrawn_launches

    def wait_for_checkpoint(self) -> None:
        """Have a planned restart wait for a checkpoint: the ranks train, and do not save."""
        self.answers = False
        self.tick((self.finding(),))
        self.answer("check", "done")
        self.run(5.0)
        assert self.phase() == "checkpoint"

    def hang_until_launch(self) -> None:
        """Have rank 3 hang until its launcher was asked for a restart."""
        self.hang(3)
        self.until(lambda: self.phase() == "launch")

    def continue_training(self) -> None:
        """End the hang, and have its finding cleared once steps finish."""
        for process in self.processes():
            process.hung = False
        self.run(2.0)
        (incident,) = self.open_incidents()
        self.tick((replace(incident.finding, cleared=True),))

    def answer(self, kind: LaunchKind, state: LaunchState, detail: str = "") -> None:
        """Have the launcher answer the newest request."""
        request = self.requests[-1]
        assert request.kind == kind
        result = LaunchResult(state=state, detail=detail)
        self.answers_of_launcher[request.action_id, kind] = result

    def relaunch(self, *, without: str | None = None) -> None:
        """Start the ranks again, in the next generation of the launcher, as they are found."""
        for node in self.nodes.values():
            node.processes = []
        self.generation += 100
        self.restarts.append(Restarted(self.generation, self.now_ns, self.highest_step))
        moved = {without: "node-4"}
        self.ranks = [
            RankView(
                rank=rank.rank,
                agent_id=moved.get(rank.agent_id, rank.agent_id),
                local_rank=rank.local_rank,
                gpu=rank.gpu,
                state="attached",
            )
            for rank in self.ranks
        ]
        for rank in self.ranks:
            process = Process(self.generation, rank.rank)
            self.nodes[rank.agent_id].processes.append(process)
        self._completed = self.checkpoint_step or 0
        self.first_step = None
        self.is_superseded = False


@pytest.fixture
def world() -> LaunchedWorld:
    return LaunchedWorld()


def test_a_crash_is_repaired_by_one_request_and_no_command(world: LaunchedWorld) -> None:
    world.crash(3)
    world.run(1.0)
    (request,) = world.requests
    action = world.one_action("restart")
    assert (request.kind, request.action_id) == ("restart", action.action_id)
    assert (request.launch.job, request.launch.restarts) == ("7", 0)
    assert world.phase() == "launch"
    world.run(5.0)
    assert world.requests == [request]
    assert not world.commands, "agents stop and start nothing"
    world.answer("restart", "done", "Slurm runs job 7 again.")
    world.run(1.0)
    assert world.phase() == "launch", "the ranks were not found yet"
    world.relaunch()
    world.until_running(101)
    action = world.one_action("restart")
    assert (action.state, [phase.name for phase in action.phases]) == (
        "done",
        ["launch", "observe", "done"],
    )
    assert action.resumed_step == world.checkpoint_step
    assert not world.open_incidents()


def test_the_ranks_may_be_found_before_the_launcher_shows_the_effect(
    world: LaunchedWorld,
) -> None:
    world.crash(3)
    world.run(1.0)
    world.is_superseded = True
    world.tick()
    assert world.state == "recovering", "the next run is the one that was asked for"
    world.relaunch()
    world.run(1.0)
    assert world.phase() == "launch"
    world.answer("restart", "done")
    world.until_running(101)


def test_a_proposal_ends_with_the_run_that_another_one_replaces() -> None:
    world = LaunchedWorld("approve")
    world.tick((world.finding(),))
    assert world.one_action("restart").state == "proposed"
    world.is_superseded = True
    world.tick()
    assert (world.state, world.one_action("restart").state) == ("failed", "superseded")


def test_a_restart_that_has_begun_ends_with_the_run_that_another_one_replaces(
    world: LaunchedWorld,
) -> None:
    world.wait_for_checkpoint()
    world.is_superseded = True
    world.tick()
    assert (world.state, world.one_action("restart").state) == ("failed", "superseded")


def test_a_lost_node_is_excluded_by_the_launchers_name(world: LaunchedWorld) -> None:
    lost = world.finding(
        "failure", cause="node lost", rank=None, severity="critical", suspects_node=True
    )
    world.tick((lost,))
    world.tick()
    (request,) = world.requests
    assert request.exclude == ["slurm-node-1"]
    assert world.nodes["node-1"].quarantined
    assert world.one_action("restart").exclude_nodes == ["node-1"]


def test_a_request_that_failed_ends_the_action_with_its_reason(world: LaunchedWorld) -> None:
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    world.answer("restart", "failed", "Slurm's job 7 has no batch script.")
    world.run(1.0)
    action = world.one_action("restart")
    assert (action.state, action.error) == ("failed", "Slurm's job 7 has no batch script.")
    assert len(world.requests) == 1
    assert world.state == "failed"


def test_a_job_that_a_person_canceled_is_stopped(world: LaunchedWorld) -> None:
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    world.answer("restart", "over", "Slurm's job 7 is CANCELLED.")
    world.run(1.0)
    assert world.state == "stopped"
    assert not world.open_incidents()


def test_a_planned_repair_asks_for_nodes_before_it_stops_anything(world: LaunchedWorld) -> None:
    world.tick((world.finding(),))
    (check,) = world.requests
    assert (check.kind, check.exclude, check.is_training) == ("check", ["slurm-node-1"], True)
    action = world.one_action("restart")
    assert action.state == "proposed"
    world.answer("check", "failed", "Partition main has no idle node.")
    world.run(5.0)
    action = world.one_action("restart", "proposed")
    assert "Partition main has no idle node." in action.reason
    assert world.state == "running"
    world.answer("check", "done")
    world.until(lambda: world.phase() == "launch")
    assert any(isinstance(one.command, ControlRanks) for one in world.commands)
    assert [request.kind for request in world.requests] == ["check", "restart"]
    world.answer("restart", "done")
    world.relaunch(without="node-1")
    world.until_running(101)
    done = world.one_action("restart")
    assert (done.state, done.lost_steps) == ("done", 0)


def test_steps_that_were_made_while_a_checkpoint_was_awaited_count_as_lost(
    world: LaunchedWorld,
) -> None:
    world.wait_for_checkpoint()
    reached, saved = world.highest_step, world.checkpoint_step
    world.crash(3)
    world.until(lambda: world.phase() == "launch")
    world.answer("restart", "done")
    world.relaunch()
    world.until_running(101)
    assert reached is not None
    assert world.one_action("restart").lost_steps == reached + 1 - (saved or 0)


def test_steps_that_are_made_until_the_launcher_ends_the_ranks_count_as_lost(
    world: LaunchedWorld,
) -> None:
    world.run(0.1, (world._fatal("hang", "process stopped (SIGSTOP)", 3, "node-1"),))
    assert world.phase() == "launch"
    decided = world.highest_step
    world.run(5.0)
    reached, saved = world.highest_step, world.checkpoint_step
    assert decided is not None
    assert reached is not None
    assert reached > decided + 1
    assert progress_of(world.one_action("restart")).has_saved
    world.answer("restart", "done")
    world.relaunch()
    world.until_running(101)
    assert world.one_action("restart").lost_steps == reached + 1 - (saved or 0)


def test_without_permission_a_repair_is_only_proposed() -> None:
    world = LaunchedWorld("approve")
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    (check,) = world.requests
    assert check.kind == "check"
    world.answer("check", "done")
    world.run(5.0)
    action = world.one_action("restart", "proposed")
    world.people(action, "approved")
    world.run(1.0)
    assert [request.kind for request in world.requests] == ["check", "restart"]


def test_the_proposal_says_why_the_server_cannot_carry_it_out() -> None:
    world = LaunchedWorld("approve")
    for rank in range(8):
        world.crash(rank)
    world.run(1.0)
    world.answer("check", "failed", "The server's host has no scontrol.")
    world.run(1.0)
    assert world.one_action("restart").error == "The server's host has no scontrol."
    assert world.state == "failed"


def test_what_a_person_approves_waits_for_the_launchers_answer() -> None:
    world = LaunchedWorld("approve")
    world.tick((world.finding(),))
    action = world.one_action("restart")
    world.people(action, "approved")
    world.run(2.0)
    assert world.one_action("restart").state == "approved"
    world.answer("check", "failed", "Other jobs wait for nodes.")
    world.run(1.0)
    action = world.one_action("restart")
    assert (action.state, action.error) == ("failed", "Other jobs wait for nodes.")
    assert world.state == "running"


def test_an_approved_plan_ends_with_the_ranks_that_it_would_stop() -> None:
    world = LaunchedWorld("approve")
    world.tick((world.finding(),))
    planned = world.one_action("restart")
    world.answer("check", "done")
    for rank in range(8):
        world.hang(rank)
    world.run(20.0)
    world.people(planned, "approved")
    for rank in range(8):
        world.crash(rank)
    world.run(5.0)
    assert world.actions[planned.action_id].state == "superseded"


def test_ranks_that_save_and_end_on_the_launchers_sigterm_have_not_finished(
    world: LaunchedWorld,
) -> None:
    world.hang_until_launch()
    request = world.requests[-1]
    result = LaunchResult(detail="Slurm has requeued job 7.", has_begun=True, has_effect=True)
    world.answers_of_launcher[request.action_id, "restart"] = result
    for rank in range(8):
        world.crash(rank, exit_code=0)
    world.run(5.0)
    assert (world.state, world.one_action("restart").state) == ("recovering", "running")
    world.answer("restart", "done")
    world.relaunch()
    world.until_running(101)
    assert world.one_action("restart").state == "done"


def test_a_job_that_finishes_before_its_launcher_shows_anything_has_finished(
    world: LaunchedWorld,
) -> None:
    world.hang_until_launch()
    world.answer("restart", "waiting", "Slurm did not answer within 10 s.")
    for rank in range(8):
        world.crash(rank, exit_code=0)
    world.run(1.0)
    assert (world.state, world.one_action("restart").state) == ("finished", "superseded")


def test_a_restart_is_withdrawn_if_the_job_trains_again_before_it_has_begun(
    world: LaunchedWorld,
) -> None:
    world.hang_until_launch()
    world.answer("restart", "waiting", "Slurm did not answer within 10 s.")
    world.run(60.0)
    assert world.one_action("restart").state == "running", "it still hangs"
    world.continue_training()
    action = world.one_action("restart")
    assert (action.state, action.finished_ns) == ("superseded", world.now_ns)
    assert world.withdrawn == [action.action_id]
    assert "policy: withdrawn " + action.action_id in world.story()
    assert (world.state, world.open_incidents()) == ("running", [])
    world.run(60.0)
    assert len(world.requests) == 1, "nothing else was wrong"
    world.hang_until_launch()
    assert len(world.requests) == 2, "the next hang is repaired"


def test_a_restart_that_has_begun_is_finished(world: LaunchedWorld) -> None:
    world.hang_until_launch()
    (request,) = world.requests
    begun = LaunchResult(detail="Slurm can requeue job 7.", has_begun=True)
    world.answers_of_launcher[request.action_id, "restart"] = begun
    world.continue_training()
    world.run(10.0)
    assert (world.phase(), world.withdrawn) == ("launch", [])


def test_a_restart_is_not_withdrawn_while_a_rank_is_dead(world: LaunchedWorld) -> None:
    world.hang_until_launch()
    world.crash(5)
    world.continue_training()
    world.run(10.0)
    assert (world.phase(), world.withdrawn) == ("launch", [])


def test_another_problem_outlasts_a_restart_that_is_withdrawn(world: LaunchedWorld) -> None:
    world.hang_until_launch()
    world.tick((world.finding(summary="Rank 2 is slow."),))
    world.continue_training()
    (incident,) = world.open_incidents()
    assert (incident.state, incident.finding.kind) == ("open", "straggler")
    assert world.requests[-1].kind == "check", "it is treated on its own"


def test_the_checkpoint_is_canceled_before_the_restart_is_withdrawn(world: LaunchedWorld) -> None:
    world.wait_for_checkpoint()
    world.hang_until_launch()
    for process in world.processes():
        process.hung = False
    world.run(2.0)
    (incident,) = world.open_incidents()
    cleared = [replace(one, cleared=True) for one in (incident.finding, *incident.symptoms)]
    world.run(5.0, tuple(cleared))
    assert world.withdrawn == [], "a rank may still save and stop"
    kinds = [one.command.kind for one in world.commands if isinstance(one.command, ControlRanks)]
    assert kinds == ["checkpoint_and_stop"] * 4 + ["cancel"] * 4
    world.answers = True
    world.run(2.0)
    assert (len(world.withdrawn), world.state) == (1, "running")
