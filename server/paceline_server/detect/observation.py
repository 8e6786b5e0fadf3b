"""The input of a detector: one `Generation` (fixed), and one `Observation` per tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline_server.detect.finding import Finding
from paceline_server.detect.recent import RecentRecords
from paceline_server.detect.telemetry import Telemetry
from paceline_server.steps.groups import Groups
from paceline_server.steps.timing import StepTiming
from paceline_server.steps.types import StepSummary, UsualStep
from paceline_server.whatif.online import RunReplay
from paceline_wire.batch import (
    DeviceEvent,
    RankDump,
    RankExited,
    RankProfile,
    RankStackTraces,
    RankState,
)
from paceline_wire.ring import StateView
from paceline_wire.topology import Topology

# If only reports older than the newest one arrive for this long, the node's clock was set back.
CLOCK_STEP_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Generation:
    """One start of the job: which rank runs on which node and GPU."""

    job: str
    number: int
    topology: Topology
    nodes: Mapping[int, str]  # agent_id by rank
    gpus: Mapping[int, int | None]  # rank -> NVML index on that node
    started_ns: int
    earlier: UsualStep | None = None  # fastest of the earlier generations

    def node(self, rank: int | None) -> str | None:
        return None if rank is None else self.nodes.get(rank)

    def stage(self, rank: int | None) -> int | None:
        if rank is None or not 0 <= rank < self.topology.world_size:
            return None
        return self.topology.coordinates(rank).pp_rank

    def rank_text(self, rank: int) -> str:
        """Return `rank 2 (node-1)`."""
        node = self.nodes.get(rank)
        return f"rank {rank}" if node is None else f"rank {rank} ({node})"

    def subject(self, rank: int | None) -> str:
        """Return `Rank 2 (node-1)`, or `The job` without a rank, to start a sentence."""
        return "The job" if rank is None else "R" + self.rank_text(rank)[1:]


@dataclass(slots=True)
class LiveRank:
    """The newest state page of one rank, and how long it has been unchanged.

    Both durations are differences on the node's own clock. Neither clock skew nor late delivery
    can make a rank look stuck: the agent must have read the same page twice.
    """

    rank: int
    state: RankState | None = None
    received_ns: int = 0  # server's clock
    frozen_since_ns: int = 0  # first report with the same page as the newest report
    changing_until_ns: int | None = None  # last report with another page
    cpu_seconds_when_frozen: float | None = None

    def update(self, state: RankState, received_ns: int) -> None:
        previous = self.state
        if previous is not None and state.time_ns <= previous.time_ns:
            if received_ns - self.received_ns < CLOCK_STEP_NS:
                return  # a repeated or reordered report
            previous = None  # the node's clock was set back
        if previous is None or _signature(previous.view) != _signature(state.view):
            self.changing_until_ns = previous.time_ns if previous is not None else None
            self.frozen_since_ns = state.time_ns
            self.cpu_seconds_when_frozen = state.cpu_seconds
        self.state = state
        self.received_ns = received_ns

    @property
    def status(self) -> str | None:
        """The status that the rank reports on its newest state page; None without a page."""
        return None if self.state is None else self.state.view.status

    @property
    def surely_frozen_seconds(self) -> float:
        """Lower bound of the time without a change: the time that the agent itself observed."""
        return 0.0 if self.state is None else (self.state.time_ns - self.frozen_since_ns) / 1e9

    @property
    def apparently_frozen_seconds(self) -> float:
        """Upper bound: time since the newest timestamp on the page, or the last change observed.

        A page without timestamps (no step started) has only the lower bound.
        """
        if self.state is None:
            return 0.0
        view, offset_ns = self.state.view, self.state.clock_offset_ns
        times = [view.step_started_ns]
        times += [frame.start_ns for frame in view.frames]
        times += [group.entered_ns for group in view.groups]
        times += [peer.entered_ns for peer in view.peers]
        if not any(times):
            return self.surely_frozen_seconds
        since_ns = max(max(times) + offset_ns, self.changing_until_ns or 0)
        age = (self.state.time_ns - since_ns) / 1e9
        return max(age, self.surely_frozen_seconds, 0.0)

    @property
    def cpu_share_while_frozen(self) -> float | None:
        """CPU seconds per second since the page last changed: 1: busy loop, 0: asleep."""
        if self.state is None or self.state.cpu_seconds is None:
            return None
        if self.cpu_seconds_when_frozen is None or not self.surely_frozen_seconds:
            return None
        return (self.state.cpu_seconds - self.cpu_seconds_when_frozen) / self.surely_frozen_seconds


def _signature(view: StateView) -> tuple[object, ...]:
    """Return the fields that change with progress.

    The loss is not among them, because NaN is unequal to itself.
    """
    return (
        view.head,
        view.step,
        view.microbatch,
        view.status,
        view.frames,
        view.groups,
        view.peers,
    )


@dataclass(frozen=True, slots=True)
class ReportedExit:
    event: RankExited
    node: str
    time_ns: int  # time of the exit on the server's clock, as far as the node's clock is known
    received_ns: int


@dataclass(frozen=True, slots=True)
class ReportedDeviceEvent:
    event: DeviceEvent
    node: str


@dataclass(frozen=True, slots=True)
class EarlierRank:
    """A rank of an earlier run of an external job, as it was last seen running."""

    node: str
    rank: int
    generation: int
    step: int | None  # newest finished step that it reported
    received_ns: int


@dataclass(frozen=True, slots=True)
class Observation:
    """The input of one tick. `steps`, `exits` and `device_events` are new since the last tick."""

    now_ns: int  # server's CLOCK_REALTIME
    steps: Sequence[StepSummary]
    exits: Sequence[ReportedExit]
    device_events: Sequence[ReportedDeviceEvent]
    ranks: Mapping[int, LiveRank]
    last_seen_ns: Mapping[str, int]  # agent_id -> when its newest batch was received
    exited: Mapping[int, RankExited]  # all ranks of the generation that have exited
    losses: Mapping[int, tuple[int, float]]  # rank -> (step, newest loss), also if non-finite
    telemetry: Telemetry
    groups: Groups
    sections: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (rank, id) -> name
    step_seconds: float | None = None  # median of the recent steps of this generation
    step_seconds_p99: float | None = None
    steps_finished: int = 0  # in this generation
    usual_step: UsualStep | None = None  # typical of its first steps; None: too few
    timings: Sequence[StepTiming] = ()  # one for each of `steps`, in the same order
    replay: RunReplay | None = None  # replay of the recent steps
    metadata: Mapping[str, str] = field(default_factory=dict)  # schedule, microbatches, ...
    records: RecentRecords | None = None  # newest records of each rank
    stacks: Mapping[int, RankStackTraces] = field(default_factory=dict)  # newest of each rank
    # The newest samples of the stacks of each rank, oldest first.
    profiles: Mapping[int, Sequence[RankProfile]] = field(default_factory=dict)
    dumps: Mapping[int, RankDump] = field(default_factory=dict)  # newest of each rank
    stragglers: frozenset[int] = frozenset()  # reported by earlier detectors of this tick
    hidden_slowdown: float = 1.0  # largest one that the earlier detectors cannot find
    # by agent_id: how much longer the delivery of its newest batch took than that of its fastest
    # one
    lateness_ns: Mapping[str, int] = field(default_factory=dict)
    # Start and end of recent steps that consist of an evaluation, a checkpoint or another pause.
    # The oldest first.
    pauses: Sequence[tuple[int, int]] = ()
    others_seen_ns: int = 0  # when the newest batch of a node without ranks of the job was received
    # Ranks of earlier runs that were seen since this generation began, if a launcher counts runs.
    earlier_ranks: Sequence[EarlierRank] = ()
    active: Sequence[Finding] = ()  # findings that are not cleared

    def training_seconds(self, since_ns: float, until_ns: float) -> float:
        """Return the time between two moments without pauses, such as evaluations."""
        paused = sum(
            max(min(end, until_ns) - max(start, since_ns), 0) for start, end in self.pauses
        )
        return max(until_ns - since_ns - paused, 0) / 1e9

    def training_since_ns(self, seconds: float) -> int:
        """Return when the newest `seconds` of training began, without pauses."""
        since_ns = self.now_ns - round(seconds * 1e9)
        for start, end in reversed(self.pauses):
            if min(end, self.now_ns) <= since_ns:
                break
            since_ns -= min(end, self.now_ns) - start
        return since_ns

    @property
    def active_kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.active)
