"""A simulated world for `decide`: nodes that carry out commands; ranks that train, crash and hang.

It stores what the store would, passes a `JobView` to `decide` at each tick, and carries out the
result a tick later. After every decision it checks the invariants.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from msgspec.structs import replace

from paceline_server.decide.decide import decide
from paceline_server.decide.incidents import is_fatal
from paceline_server.decide.progress import progress_of
from paceline_server.decide.types import (
    Acknowledged,
    ActionView,
    AuditEntry,
    Decision,
    Experience,
    IncidentView,
    IssuedCommand,
    JobSpec,
    JobState,
    JobView,
    NodeView,
    RankView,
    Restarted,
)
from paceline_server.detect.causes.catalog import PROCESS_STOPPED
from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy
from paceline_wire.commands import ControlRanks, StartRanks, StopGeneration
from paceline_wire.topology import Topology

SECOND = 1_000_000_000
AGENT_LEASE_SECONDS = 30.0  # longer than the server's: until then a cut-off node is a zombie
ENDED = ("finished", "failed", "stopped")
UNFINISHED = ("proposed", "approved", "running")


@dataclass
class Process:
    """The actual state of one rank on its node, independent of the server's view."""

    generation: int
    rank: int
    hung: bool = False
    control: ControlRanks | None = None


@dataclass
class Node:
    agent_id: str
    slots: int = 2
    lost_gpus: set[int] = field(default_factory=set)
    connected: bool = True  # whether its batches arrive
    obeys_stop: bool = True
    was_paused: bool = False
    fails_to_start: bool = False
    crashes_at_start: int = 0  # number of starts at which its first rank will exit
    quarantined: bool = False
    last_seen_ns: int = 0
    processes: list[Process] = field(default_factory=list)
    pending: list[IssuedCommand] = field(default_factory=list)


class World:
    def __init__(
        self,
        nodes: int = 5,
        topology: Topology | None = None,
        *,
        slots: int = 2,
        policy: Policy | None = None,
        step_seconds: float = 0.5,
        last_step: int = 10_000,
    ) -> None:
        self.now_ns = 1_000 * SECOND
        self.ended_received_ns: int | None = None
        self.nodes = {f"node-{index}": Node(f"node-{index}", slots) for index in range(nodes)}
        self.policy = policy or Policy()
        self.policy_version: int | None = None
        self.spec = JobSpec(name="gpt", argv=["train"], topology=topology or Topology(2, 2, 2))
        self.step_seconds = step_seconds
        self.last_step = last_step
        self.stepless: set[int] = set()  # ranks without steps, such as a generator
        self.checkpoint_every = 10
        self.can_checkpoint: bool | None = True  # as the script declared
        self.can_save = True
        self.resumes = True  # whether the script continues from its newest checkpoint
        self.answers = True  # whether the script reads commands
        self.detects = True
        self.server_is_asleep = False  # whether it has not yet read what agents sent meanwhile

        self.state: JobState = "pending"
        self.generation = 0
        self.topology = self.spec.topology
        self.ranks: list[RankView] = []
        self.incidents: dict[str, IncidentView] = {}
        self.actions: dict[str, ActionView] = {}
        self.restarts: list[Restarted] = []
        self.acknowledged: list[Acknowledged] = []
        self.results: dict[int, bool] = {}
        self.highest_step: int | None = None
        self.checkpoint_step: int | None = None
        self.saved_step: int | None = None  # the same, of this generation
        self.first_step: int | None = None  # the first that this generation finished
        self.step_times: dict[int, tuple[int, int]] = {}
        self.experience = Experience()
        self.stop_requested = False
        self.audit: list[AuditEntry] = []
        self.commands: list[IssuedCommand] = []
        self.quarantined: dict[str, str] = {}
        self.decisions: list[Decision] = []
        self.approved: set[str] = set()  # actions that a person approved

        self._completed = 0  # steps of the running generation
        self._since_step_ns = 0
        self._silent_since_ns: int | None = None
        self._command_ids = itertools.count(1)
        self._ids = itertools.count(1)

    # --- queries ------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return self.now_ns / SECOND

    def one_action(self, kind: str, state: str | None = None) -> ActionView:
        found = [
            one for one in self.actions.values() if one.kind == kind and state in (None, one.state)
        ]
        assert len(found) == 1, f"expected one {kind} ({state}), got {found}"
        return found[0]

    def restart_actions(self) -> list[ActionView]:
        return [one for one in self.actions.values() if one.kind == "restart"]

    def open_incidents(self) -> list[IncidentView]:
        return [one for one in self.incidents.values() if one.state != "resolved"]

    def home(self, rank: int) -> str:
        return self.ranks[rank].agent_id

    def phase(self) -> str | None:
        """Return the current phase of the running action."""
        running = [one for one in self.actions.values() if one.state == "running"]
        return running[0].phases[-1].name if running else None

    def started_on(self, generation: int) -> set[str]:
        return {
            one.agent_id
            for one in self.commands
            if isinstance(one.command, StartRanks) and one.command.generation == generation
        }

    def processes(self) -> list[Process]:
        return [process for node in self.nodes.values() for process in node.processes]

    # --- actions ------------------------------------------------------------------------

    def finding(self, kind: str = "straggler", **changes: object) -> Finding:
        values: dict[str, object] = {
            "kind": kind,
            "cause": "thermal throttle",
            "fingerprint": f"{kind}/{changes.get('rank', 2)}",
            "summary": "Rank 2 is 2.5x slower: thermal throttle on node-1.",
            "detected_ns": self.now_ns,
            "generation": self.generation,
            "rank": 2,
            "node": "node-1",
            "step": self.highest_step,
            "slowdown": 2.5,
            "cost_ratio": 0.6,
            "suspects_node": kind == "straggler",
        }
        return Finding(**{**values, **changes})  # type: ignore[arg-type]

    def crash(self, rank: int, exit_code: int | None = None) -> None:
        node = self.nodes[self.home(rank)]
        node.processes = [one for one in node.processes if one.rank != rank]
        self._exited(rank, exit_code=exit_code, signal=9 if exit_code is None else None)

    def hang(self, rank: int) -> None:
        next(one for one in self._current() if one.rank == rank).hung = True

    def lose(self, agent_id: str) -> None:
        """Remove the node with all its processes."""
        self.nodes[agent_id].connected = False
        self.nodes[agent_id].processes = []

    def lose_gpu(self, agent_id: str, gpu: int) -> None:
        """Take a GPU from the node: its ranks stop, and the node offers the other GPUs."""
        self.nodes[agent_id].lost_gpus.add(gpu)
        for rank in self.ranks:
            if (rank.agent_id, rank.gpu) == (agent_id, gpu):
                self.hang(rank.rank)

    def people(self, action: ActionView, state: str) -> None:
        self.actions[action.action_id] = replace(action, state=state)
        if state == "approved":
            self.approved.add(action.action_id)

    def run(self, seconds: float, findings: tuple[Finding, ...] = ()) -> None:
        for _ in range(round(seconds / 0.1)):
            self.tick(findings)
            findings = ()

    def until(self, condition: object, seconds: float = 60.0) -> float:
        """Tick until `condition()`; return the simulated seconds it took."""
        assert callable(condition)
        began = self.seconds
        while not condition():
            assert self.seconds - began < seconds, f"not within {seconds} s: {self.story()}"
            self.tick()
        return self.seconds - began

    def until_running(self, generation: int, seconds: float = 60.0) -> float:
        return self.until(
            lambda: self.state == "running" and self.generation == generation, seconds
        )

    def story(self) -> str:
        return "\n".join(
            f"{one.actor}: {one.verb} {one.subject} {one.detail}" for one in self.audit
        )

    def tick(self, findings: tuple[Finding, ...] = ()) -> Decision:
        self.now_ns += SECOND // 10
        for node in self.nodes.values():
            self._work(node)
        self._train()
        decision = decide(
            self.view(),
            [*self._detected(), *findings],
            self.policy,
            self.now_ns,
            next_command_id=lambda: next(self._command_ids),
            new_id=lambda prefix: f"{prefix}-{next(self._ids):08}",
        )
        self._check(decision)
        self._apply(decision)
        return decision

    def view(self) -> JobView:
        unfinished = [one for one in self.actions.values() if one.finished_ns is None]
        ids = {one.action_id for one in unfinished}
        ids_of_job = {one.command.command_id for one in self.commands if one.action_id in ids}
        holding = {one.agent_id for one in self.ranks} if self.state not in ENDED else set()
        return JobView(
            job_id="job-1",
            spec=self.spec,
            state=self.state,
            generation=self.generation,
            topology=self.topology,
            ranks=self.ranks,
            ended_received_ns=self.ended_received_ns,
            nodes=[
                NodeView(
                    agent_id=node.agent_id,
                    address=f"10.0.0.{index}",
                    rendezvous_port=29500 + index,
                    slots=node.slots - len(node.lost_gpus),
                    gpus=[gpu for gpu in range(node.slots) if gpu not in node.lost_gpus],
                    is_degraded=bool(node.lost_gpus),
                    last_seen_ns=node.last_seen_ns,
                    boot_id="boot",
                    quarantined=node.quarantined,
                    job="job-1" if node.agent_id in holding else None,
                )
                for index, node in enumerate(self.nodes.values())
            ],
            incidents=self.open_incidents(),
            actions=unfinished,
            restarts=self.restarts,
            acknowledged=[one for one in self.acknowledged if one.command_id in ids_of_job],
            command_results={id_: ok for id_, ok in self.results.items() if id_ in ids_of_job},
            command_errors={
                id_: "rank 0: no such file" for id_, ok in self.results.items() if not ok
            },
            highest_step=self.highest_step,
            checkpoint_step=self.checkpoint_step,
            saved_step=self.saved_step,
            first_step=self.first_step,
            step_times=dict(self.step_times),
            experience=self.experience,
            can_checkpoint=self.can_checkpoint,
            step_seconds=self.step_seconds if self.highest_step is not None else None,
            stop_requested=self.stop_requested,
            policy_version=self.policy_version,
        )

    # --- nodes --------------------------------------------------------------------------

    def _work(self, node: Node) -> None:
        if self.server_is_asleep:
            return
        if not node.connected:
            # An agent without contact to the server for its lease kills its ranks.
            if self.now_ns - node.last_seen_ns > AGENT_LEASE_SECONDS * SECOND:
                node.processes = []
            return
        node.last_seen_ns = self.now_ns
        pending, node.pending = node.pending, []
        for issued in pending:
            command = issued.command
            if isinstance(command, StartRanks):
                self._start(node, command)
            elif isinstance(command, StopGeneration):
                self._stop(node, command)
            elif isinstance(command, ControlRanks):
                for process in node.processes:
                    if process.generation == command.generation:
                        process.control = command
                self.results[command.command_id] = True

    def _start(self, node: Node, command: StartRanks) -> None:
        newer = any(one.generation > command.generation for one in node.processes)
        self.results[command.command_id] = not (newer or node.fails_to_start)
        if not self.results[command.command_id]:
            return
        node.processes += [Process(command.generation, spec.rank) for spec in command.ranks]
        for spec in command.ranks:
            if command.generation == self.generation:
                self._set(spec.rank, state="attached")
        if node.crashes_at_start:
            node.crashes_at_start -= 1
            if command.generation == self.generation:
                self.crash(command.ranks[0].rank)
            else:
                node.processes = []  # the command came too late

    def _stop(self, node: Node, command: StopGeneration) -> None:
        if not node.obeys_stop:
            node.was_paused = True
            return
        dead = [one for one in node.processes if one.generation <= command.generation]
        node.processes = [one for one in node.processes if one.generation > command.generation]
        for process in dead:
            if process.generation == self.generation:
                self._exited(process.rank, signal=9, commanded=True)
        self.results[command.command_id] = True

    # --- training -----------------------------------------------------------------------

    def _current(self) -> list[Process]:
        return [one for one in self.processes() if one.generation == self.generation]

    def _train(self) -> None:
        ranks = self._current()
        whole = len(ranks) == self.topology.world_size
        if not whole or any(one.hung for one in ranks):
            self._silent_since_ns = self._silent_since_ns or self.now_ns
            return
        self._silent_since_ns = None
        self._since_step_ns += SECOND // 10
        if self._since_step_ns < self.step_seconds * SECOND:
            return
        self._since_step_ns = 0
        self._completed += 1
        step = self._completed - 1
        self.first_step = step if self.first_step is None else self.first_step
        duration_ns = int(self.step_seconds * SECOND)
        self.step_times[step] = self.now_ns - duration_ns, self.now_ns
        self.highest_step = max(step, -1 if self.highest_step is None else self.highest_step)
        for rank in set(range(self.topology.world_size)) - self.stepless:
            self._set(rank, step=step)
        if self._completed % self.checkpoint_every == 0 and self.can_save:
            if self.checkpoint_step is not None and self.checkpoint_step < self._completed:
                interval = self._completed - self.checkpoint_step
                self.experience = replace(self.experience, checkpoint_interval_steps=interval)
            self.checkpoint_step = self.saved_step = self._completed
        if self._completed >= self.last_step:
            self._all_exit(commanded=False)
        else:
            self._obey(ranks)

    def _obey(self, ranks: list[Process]) -> None:
        if not self.answers:
            return
        controls = [one.control for one in ranks if one.control is not None]
        newest = max(controls, key=lambda one: one.command_id, default=None)
        if newest is None or self._completed < newest.target_step:
            return
        cancels = newest.kind == "cancel"
        for process in ranks:
            status = "done" if self.can_save or cancels else "failed"
            self.acknowledged.append(
                Acknowledged(process.rank, newest.command_id, status, self._completed)
            )
            process.control = None
        if self.can_save and not cancels:
            self.checkpoint_step = self.saved_step = self._completed
            self._all_exit(commanded=True)

    def _all_exit(self, *, commanded: bool) -> None:
        for node in self.nodes.values():
            node.processes = [one for one in node.processes if one.generation != self.generation]
        for rank in range(self.topology.world_size):
            self._exited(rank, exit_code=0, commanded=commanded)

    def _exited(self, rank: int, **values: object) -> None:
        self._set(rank, state="exited", **values)

    def _set(self, rank: int, **values: object) -> None:
        self.ranks = [replace(one, **values) if one.rank == rank else one for one in self.ranks]

    # --- minimal detectors ---------------------------------------------------------------

    def _detected(self) -> list[Finding]:
        if not self.detects or self.state in ENDED or self.state == "pending":
            return []
        found = []
        for rank in self.ranks:
            if rank.state == "exited" and not rank.commanded and rank.exit_code != 0:
                cause = f"killed by signal {rank.signal}"
                found.append(self._fatal("failure", cause, rank.rank, rank.agent_id))
        found += [
            self._fatal("failure", "GPU lost", None, rank.agent_id, node=True)
            for rank in self.ranks
            if rank.gpu in self.nodes[rank.agent_id].lost_gpus
        ]
        for agent_id in sorted({rank.agent_id for rank in self.ranks}):
            node = self.nodes[agent_id]
            if self.now_ns - node.last_seen_ns > self.policy.node_lease_seconds * SECOND:
                found.append(self._fatal("failure", "node lost", None, agent_id, node=True))
        there = sorted(self._current(), key=lambda one: not one.hung)
        if there and self.now_ns - (self._silent_since_ns or self.now_ns) > 3 * SECOND:
            rank = there[0].rank
            found.append(self._fatal("hang", PROCESS_STOPPED, rank, self.home(rank)))
        return found

    def _fatal(
        self, kind: str, cause: str, rank: int | None, agent_id: str, *, node: bool = False
    ) -> Finding:
        who = f"Rank {rank}" if rank is not None else agent_id
        return self.finding(
            kind,
            cause=cause,
            fingerprint=f"{kind}/{rank}/{agent_id}",
            summary=f"{who}: {cause}.",
            rank=rank,
            node=agent_id,
            severity="critical",
            suspects_node=node,
            can_checkpoint=False,
            slowdown=None,
            cost_ratio=None,
        )

    # --- the store, and the invariants --------------------------------------------------

    def _check(self, decision: Decision) -> None:
        if decision.generation is not None:
            assert decision.generation == self.generation + 1, "a generation was skipped"
            assert decision.ranks is not None
            assert [one.rank for one in decision.ranks] == list(range(len(decision.ranks)))
            topology = decision.topology or self.topology
            assert len(decision.ranks) == topology.world_size
        for issued in decision.commands:
            command = issued.command
            if isinstance(command, StartRanks):
                self._check_start(issued.agent_id, command, decision)
            elif isinstance(command, StopGeneration):
                self._check_stop(issued.action_id, command, decision)
        for action in decision.actions:
            assert action.reason
            assert all(phase.detail for phase in action.phases)
            assert (action.finished_ns is None) == (action.state in UNFINISHED)
        after = self.actions | {one.action_id: one for one in decision.actions}
        running = [one for one in after.values() if one.state in ("approved", "running")]
        assert len(running) <= 1, running
        launched = [
            one.generation
            for one in after.values()
            if one.kind in ("start", "restart") and any(p.name == "start" for p in one.phases)
        ]
        assert len(launched) == len(set(launched)), "two restarts of one generation"

    def _check_start(self, agent_id: str, command: StartRanks, decision: Decision) -> None:
        node = self.nodes[agent_id]
        assert command.generation == decision.generation
        assert not node.quarantined
        assert agent_id not in decision.quarantine
        lapsed = self.now_ns - node.last_seen_ns > self.policy.node_lease_seconds * SECOND
        assert not lapsed, f"{agent_id} was given ranks although it is silent"
        assert len(command.ranks) <= node.slots - len(node.lost_gpus)
        assert not node.lost_gpus & {one.gpu for one in command.ranks}, "ranks on a lost GPU"
        assert [one.local_rank for one in command.ranks] == list(range(len(command.ranks)))
        alive = [one for one in node.processes if one.generation < command.generation]
        assert not alive, f"{agent_id} still runs {alive}"

    def _check_stop(self, action_id: str, command: StopGeneration, decision: Decision) -> None:
        """Check that a job that makes progress is stopped only with a checkpoint or at a person's
        request."""
        actions = self.actions | {one.action_id: one for one in decision.actions}
        action = actions[action_id]
        if action.kind != "restart" or command.generation != self.generation:
            return
        whole = len(self._current()) == self.topology.world_size
        reachable = all(node.connected for node in self.nodes.values())
        hung = any(one.hung for one in self.processes())
        if not whole or hung or not reachable or self.server_is_asleep or self.highest_step is None:
            return
        incidents = [*self.open_incidents(), *decision.incidents]
        if any(is_fatal(one.finding) for one in incidents):
            return
        approved = action_id in self.approved
        progress = progress_of(action)
        saved = {result.rank for result in self.acknowledged if result.status == "done"}
        # A person has allowed it in advance: the steps after a divergence are no progress.
        is_allowed = self.policy.loss_rollback == "auto"
        approved |= is_allowed and progress.roll_back_onset is not None
        assert approved or progress.saved_step is not None or saved, "progress was destroyed"

    def _apply(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.audit += decision.audit
        self.commands += decision.commands
        for issued in decision.commands:
            self.nodes[issued.agent_id].pending.append(issued)
        self.incidents |= {one.incident_id: one for one in decision.incidents}
        self.actions |= {one.action_id: one for one in decision.actions}
        for agent_id, why in decision.quarantine.items():
            self.nodes[agent_id].quarantined = True
            self.quarantined[agent_id] = why
        if decision.restarted is not None:
            self.restarts.append(decision.restarted)
        if decision.experience is not None:
            self.experience = decision.experience
        if decision.state is not None:
            self.state = decision.state
        if decision.topology is not None:
            self.topology = decision.topology
        if decision.ranks is not None:
            self.ranks = decision.ranks
        if decision.generation is not None:
            self.generation = decision.generation
            self._completed = (self.checkpoint_step or 0) if self.resumes else 0
            self.saved_step = self.checkpoint_step if self.resumes else None  # the one it loads
            self.first_step = None
            self.step_times = {}
            self._since_step_ns = 0
            self._silent_since_ns = None
