"""The input and output of `decide`. Plain data: no database, no clock.

Times are nanoseconds of the server's CLOCK_REALTIME.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from paceline_server.detect.finding import Finding
from paceline_server.engine.types import Launch
from paceline_wire.commands import Command
from paceline_wire.topology import Topology

JobState = Literal["pending", "starting", "running", "recovering", "finished", "failed", "stopped"]
IncidentState = Literal["open", "mitigating", "resolved"]
ActionKind = Literal["start", "checkpoint", "restart", "stop", "quarantine", "notify"]
ActionState = Literal[
    "proposed",  # waits for approval (mode approve), or only shown (observe, dry-run)
    "approved",
    "running",
    "done",
    "failed",
    "rejected",
    "superseded",
]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    argv: list[str]
    topology: Topology  # as requested; the current topology may be smaller
    environment: dict[str, str] = {}
    directory: str | None = None
    checkpoint_directory: str | None = None
    metadata: dict[str, str] = {}  # schedule, microbatches, ...


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One agent as the store has it. `job`: the job whose ranks it holds now, if any."""

    agent_id: str
    address: str
    rendezvous_port: int
    slots: int
    gpus: list[int]  # NVML indices of the GPUs that can hold a rank
    is_degraded: bool = False  # some of its GPUs cannot hold a rank
    last_seen_ns: int
    boot_id: str
    quarantined: bool = False
    job: str | None = None


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the current generation: its place and its state."""

    rank: int
    agent_id: str
    local_rank: int
    gpu: int | None
    pid: int | None = None
    state: Literal["assigned", "started", "attached", "exited"] = "assigned"
    exit_code: int | None = None
    signal: int | None = None
    commanded: bool = False
    launcher_signal: int | None = None  # that asked its launcher to end, which ended the rank
    step: int | None = None  # newest finished step of this generation


class FailureHistory(msgspec.Struct, frozen=True):
    """Failures and hangs of all jobs of the fleet, and the time in which they were seen."""

    failures: int
    node_seconds: float


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """A return to a checkpoint before the loss went wrong."""

    action_id: str
    onset_step: int  # first step whose loss may be wrong
    step: int  # no checkpoint after this one is loaded
    skip_steps: int = 0  # steps from there whose data is left out


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a job's checkpoints and starts that it has shown so far."""

    checkpoint_interval_steps: int | None = None  # median of the recent ones
    checkpoint_seconds: float | None = None  # time that one blocks the slowest rank; median
    checkpoint_saving_steps: int = 0  # made until an asynchronous one is complete; median
    nodes: int = 0  # that run its ranks
    fleet: FailureHistory | None = None
    # Whether the last restart continued from the newest known checkpoint; None: never restarted.
    resumes: bool | None = None
    # From the stop of the ranks to a step of all, of the last restart; before that, of the start.
    pause_seconds: float | None = None
    starts: int = 0  # first starts and restarts that were observed to the end
    failed_starts: int = 0  # starts that did not lead to a step of all ranks
    rolled_back: list[RolledBack] = []  # the newest last
    spare_due_ns: int = 0  # when a spare node is next ordered to import the job's modules
    # The generation whose usual stacks are sampled, and when they next are.
    sampled_generation: int | None = None
    sample_due_ns: int = 0


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The expected gain and cost of a planned restart, and the figures that they follow from."""

    gain_seconds: float
    cost_seconds: float
    slow_ratio: float  # share of the step time that the fault costs
    slow_seconds: float  # how long it is expected to last after the restart would begin
    lasted_seconds: float  # so far
    remaining_seconds: float  # rest of the training
    is_remaining_known: bool  # reported by the script; else assumed
    kept_ratio: float  # ranks after the restart over ranks now
    wait_seconds: float  # for the script's own checkpoint
    pause_seconds: float
    is_pause_measured: bool
    repeated_steps: int
    repeated_seconds: float
    failure_probability: float

    @property
    def is_positive(self) -> bool:
        """Whether the gain exceeds the cost."""
        return self.gain_seconds > self.cost_seconds


class Phase(msgspec.Struct, frozen=True):
    """One phase of an action."""

    name: str  # "checkpoint", "wait", "stop", "launch", "start", "observe", "done", ...
    started_ns: int
    detail: str = ""


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    incident_id: str
    finding: Finding  # the strongest so far
    symptoms: list[Finding] = []  # other findings grouped into it
    state: IncidentState = "open"
    opened_ns: int
    # When the problem of `finding` was detected. Later than `opened_ns` if the incident began as a
    # lesser problem, such as a slowdown before a crash. None: stored by an earlier release.
    detected_ns: int | None = None
    # When the problem began: the end of the last step before training stopped, or the start of the
    # first slow step. None: not known.
    onset_ns: int | None = None
    resolved_ns: int | None = None
    milder_since_ns: int | None = None  # since when the verdict is less severe than `finding`
    action_ids: list[str] = []
    stacks_asked: list[int] = []  # ranks whose Python stacks were requested
    stacks_asked_ns: int | None = None  # when stacks were last requested
    profiles_asked: list[int] = []  # slow ranks that were sampled, each with a peer
    dumps_asked_ns: int | None = None  # when Flight Recorder dumps of all ranks were requested

    @property
    def detection_ns(self) -> int:
        """When its problem was detected."""
        return self.opened_ns if self.detected_ns is None else self.detected_ns


class ActionView(msgspec.Struct, frozen=True, kw_only=True):
    """One action and its progress. `parameters` is internal to `decide`."""

    action_id: str
    kind: ActionKind
    state: ActionState
    reason: str  # one sentence for people
    generation: int  # the generation acted on; a restart leads to generation + 1
    created_ns: int
    finished_ns: int | None = None
    incident_id: str | None = None
    exclude_nodes: list[str] = []
    phases: list[Phase] = []
    parameters: dict[str, Any] = {}
    lost_steps: int | None = None  # steps lost by a finished restart
    # The steps that a proposed restart would repeat, since the newest checkpoint. None: unknown.
    price_steps: int | None = None
    price_seconds: float | None = None
    worth: Worth | None = None  # restarts for a slowdown only
    resumed_step: int | None = None  # first step trained after the restart
    decided_by: str | None = None  # who approved, rejected or requested it
    policy_version: int | None = None  # by which it was decided last; None: not known
    error: str | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the script's own checkpoint, and has not yet changed anything."""
        return self.state == "running" and bool(self.phases) and self.phases[-1].name == "wait"

    @property
    def can_be_rejected(self) -> bool:
        """Whether a person can still reject it."""
        return self.state == "proposed" or self.is_waiting


class Acknowledged(msgspec.Struct, frozen=True):
    """A rank's result of the control command of an action."""

    rank: int
    command_id: int
    status: str  # "seen", then "done" (saved), "failed" or "withdrawn"
    step: int


class Restarted(msgspec.Struct, frozen=True):
    """One past generation change, for budgets and backoff."""

    generation: int  # the generation that it started
    at_ns: int
    highest_step: int | None  # highest step of the job until then
    node: str | None = None  # the node to blame
    has_saved: bool = False  # whether the generation that it ended had (`JobView.has_saved`)
    is_request: bool = False  # requested by a person: no evidence against the job


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `decide` may read."""

    job_id: str
    spec: JobSpec
    state: JobState
    generation: int
    topology: Topology  # topology of the current generation
    ranks: list[RankView]
    nodes: list[NodeView]
    incidents: list[IncidentView]  # unresolved
    actions: list[ActionView]  # unfinished, and those just approved or rejected
    restarts: list[Restarted] = []
    acknowledged: list[Acknowledged] = []  # results of unfinished actions' commands
    command_results: dict[int, bool] = {}  # id -> ok, of unfinished actions
    command_errors: dict[int, str] = {}  # and why those that failed did, as the agent reports it
    highest_step: int | None = None  # finished by all ranks, over all generations
    checkpoint_step: int | None = None  # newest step that every rank reported as committed
    saved_step: int | None = None  # the same, reported by the ranks of this generation
    first_step: int | None = None  # first step that all ranks of this generation finished
    # Start and end of the recent steps of this generation, the newest last.
    step_times: Mapping[int, tuple[int, int]] = {}
    experience: Experience = Experience()
    # Whether all ranks save a checkpoint on command; None: not yet known.
    can_checkpoint: bool | None = None
    step_seconds: float | None = None  # median of the recent steps
    stop_requested: bool = False
    policy_version: int | None = None
    is_superseded: bool = False  # another run of this job was started without Paceline
    is_external: bool = False  # another program started its ranks
    launch: Launch | None = None  # the launcher that owns the job and can restart it
    # Results of requests to the launcher, of unfinished actions: (action id, kind) -> result.
    launch_results: dict[tuple[str, LaunchKind], LaunchResult] = {}
    # When the end of the last rank was received; None: some ranks still run.
    ended_received_ns: int | None = None

    @property
    def current_step(self) -> int | None:
        """The newest step that all ranks of this generation finished; before that, of the job.

        A script that does not number its steps counts from 0 in each generation.
        """
        steps = [rank.step for rank in self.ranks if rank.step is not None]
        return min(steps) if steps and len(steps) == len(self.ranks) else self.highest_step

    @property
    def has_saved(self) -> bool:
        """Whether this generation has saved a checkpoint after a step of its own.

        A checkpoint that it resumed from is not newer than its first step.
        """
        saved, first = self.saved_step, self.first_step
        return saved is not None and first is not None and saved > first


class IssuedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command to issue.

    `command.command_id` is already unique: `decide` takes ids from `next_command_id`.
    """

    agent_id: str
    # Id of the action, or of the incident that the command gathers evidence for; empty: neither.
    action_id: str
    command: Command


LaunchKind = Literal["check", "restart"]
LaunchState = Literal[
    "waiting",
    "done",  # check: a restart is possible; restart: the job runs again
    "failed",
    "over",  # there is nothing to restart: a person ended the job
]


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the launcher that owns a job: the intent of an action.

    It is committed before the launcher is asked for anything. `check` only asks whether a restart
    is possible; `restart` ends the job's current run and begins the next one on other nodes than
    those of `exclude`, once, and only if the launcher has not restarted the job since.
    """

    action_id: str
    kind: LaunchKind
    launch: Launch  # at the time of the decision
    exclude: list[str] = []  # nodes, as the launcher names them
    is_training: bool = False  # check: it may only be restarted if it would get nodes at once
    reason: str  # shown where the launcher records reasons


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a request: how far it got, and what it waits for or why it failed."""

    state: LaunchState = "waiting"
    detail: str = ""
    has_begun: bool = False  # restart: the launcher may have been asked, so it must be finished
    has_effect: bool = False  # the launcher shows that it ends the ranks, or has ended them


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    actor: str  # "policy", "detector:hang", a token's name, ...
    verb: str  # "opened", "proposed", "approved", "started generation 2", ...
    subject: str  # id of the incident, action or node
    detail: str = ""


class Decision(msgspec.Struct, kw_only=True):
    """The changes to one job. Views are complete: the store replaces the row of the same id."""

    state: JobState | None = None
    generation: int | None = None
    topology: Topology | None = None
    ranks: list[RankView] | None = None  # placement of the new generation
    incidents: list[IncidentView] = []
    actions: list[ActionView] = []
    commands: list[IssuedCommand] = []
    launch_requests: list[LaunchRequest] = []
    withdrawn_launches: list[str] = []  # ids of the actions whose restart is no longer requested
    quarantine: dict[str, str] = {}  # agent_id -> reason
    restarted: Restarted | None = None
    experience: Experience | None = None
    audit: list[AuditEntry] = []
