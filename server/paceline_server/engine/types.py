"""The input and the outcome of the engine."""

from __future__ import annotations

import msgspec

from paceline_server.detect.finding import Finding
from paceline_server.steps.types import Ledger, StepSummary
from paceline_wire.topology import Topology


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher that owns an external job, with its own names of the job and the nodes."""

    launcher: str  # "slurm"
    job: str
    uid: str | None = None  # tells the job from a later one of the same name, if it is known
    restarts: int  # how often the launcher had restarted the job before these ranks started
    nodes: dict[str, str]  # agent_id -> node
    # agent_id -> restarts, if the launcher counts on each node for itself
    counts: dict[str, int] = {}

    def is_before(self, other: Launch) -> bool:
        """Return whether the launcher has restarted the job between this and the other.

        Either may be of some of the nodes only. Fewer nodes than before follow on a restart, too.
        """
        if not (self.counts and other.counts):
            return self.restarts < other.restarts
        common = self.counts.keys() & other.counts.keys()
        has_grown = any(self.counts[agent] < other.counts[agent] for agent in common)
        return has_grown or self.counts.keys() > other.counts.keys()


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how one generation runs; passed to `Engine.place` at its start."""

    generation: int
    topology: Topology
    nodes: dict[int, str]  # rank -> agent_id
    gpus: dict[int, int | None]  # rank -> NVML index on that node
    # Where the ranks found the topology, if it is not the requested one.
    topology_source: str | None = None
    metadata: dict[str, str] = {}  # schedule ("gpipe", "1f1b"), microbatches, ...
    started_ns: int  # CLOCK_REALTIME
    was_found: bool = False  # external job: found running at `started_ns`
    resume_step: int | None = None  # first step of this generation, if known
    launch: Launch | None = None  # external job whose launcher is known
    users: list[int] = []  # external job: uids of its ranks, as their nodes report them
    # by rank: the generation that it reports, if it differs from `generation`
    reported_generations: dict[int, int] = msgspec.field(default_factory=dict, name="said")

    def reported_generation(self, rank: int) -> int:
        """Return the generation in this rank's events: launchers count per node."""
        return self.reported_generations.get(rank, self.generation)


class RankProgress(msgspec.Struct, frozen=True):
    """The latest state of one rank of the current generation."""

    rank: int
    step: int | None  # newest finished step
    operation: str | None  # in flight, e.g. "all_reduce tp#118"; None: between operations
    operation_seconds: float | None  # duration of the operation so far
    process_state: str | None
    status: str  # ring.Status name


class Outcome(msgspec.Struct, kw_only=True):
    """The changes since the last tick."""

    placement: Placement | None = None  # as reported by the running ranks
    steps: list[StepSummary] = []
    findings: list[Finding] = []
    progress: list[RankProgress] = []  # progress of the ranks that have changed
    ledger: Ledger = Ledger()
    step_seconds: float | None = None  # median of the recent steps
    highest_step: int | None = None
    can_checkpoint: bool | None = None  # all ranks declared it; None: not yet known
    saved_step: int | None = None  # newest committed checkpoint that the ranks reported
    checkpoint_interval_steps: int | None = None  # median of the recent ones of this generation
    checkpoint_seconds: float | None = None  # time that one blocks the slowest rank; median
    checkpoint_saving_steps: int | None = None  # made until one is complete; median
    first_step: int | None = None  # that all ranks of this generation finished
    # Start and end of the recent steps of this generation, the newest last; not a copy.
    step_times: dict[int, tuple[int, int]] = {}
    ended_ns: int | None = None  # when the last rank exited; None: some ranks still run
    ended_received_ns: int | None = None  # when the report of that was received
