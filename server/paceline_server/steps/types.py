"""Results of the step model and the ledger. Times are seconds, ratios 0..1."""

from __future__ import annotations

from statistics import fmean

import msgspec

from paceline_wire.topology import Topology


class StageBubble(msgspec.Struct, frozen=True):
    """Idle time of one pipeline stage within the pipeline phase of one step.

    A stage idles while it waits for others, or does nothing although all inputs are ready. Short
    transfers do not count (see `steps.bubbles`). The shares sum to `excess_ratio`; a share is
    negative where it makes the stage idle less, as imbalance does for the slowest stage. None: not
    enough was recorded.
    """

    stage: int
    measured_ratio: float
    theory_ratio: float | None  # None: unknown schedule
    excess_ratio: float | None = None  # measured - theory
    imbalance_ratio: float | None = None  # stages differ in duration
    straggler_ratio: float | None = None  # ranks of a stage differ
    variation_ratio: float | None = None  # microbatches differ: sequence lengths, jitter
    transfer_ratio: float | None = None  # long sends and receives
    data_ratio: float | None = None  # a stage waited for data
    launch_ratio: float | None = None  # the host started late although all inputs were ready
    other_ratio: float | None = None


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One rank's share of one step. The parts sum to the rank's step time, `other` included."""

    rank: int
    step_seconds: float
    self_seconds: float  # own work, see `RankTimes`: the basis of comparison with peers
    compute_seconds: float
    communication_seconds: float  # exposed: the host was blocked
    wait_seconds: float  # the part of communication before the last participant arrived
    bubble_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float
    gc_seconds: float
    slowdown: float | None  # self time over its peers' (same stage); None: no peers
    overlapped_seconds: float = 0.0  # communication in flight while the host was not blocked in it


class StepMeans(msgspec.Struct, frozen=True, array_like=True):
    """Means over the ranks of one step."""

    compute_seconds: float
    communication_seconds: float
    wait_seconds: float
    bubble_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float
    overlapped_seconds: float = 0.0


class StepGoodput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The compute, communication and bubble of one step, split into needed and lost time.

    Means over the ranks; they sum to those of the three parts and to the evaluations. Needed is
    what the step would have taken on healthy peers (docs/efficiency.md).
    """

    compute_seconds: float
    communication_seconds: float  # exposed transfers
    bubble_seconds: float  # idle time that the schedule has
    straggler_seconds: float  # lost: ranks reported as stragglers, and waits for them
    peer_wait_seconds: float  # lost: other waits for the last rank of a collective or transfer
    bubble_excess_seconds: float  # lost: idle time beyond the schedule
    slow_link_seconds: float = 0.0  # lost: slow links, and waits for them
    imbalance_seconds: float = 0.0  # lost: other ranks that take longer, and waits for them
    evaluation_seconds: float = 0.0  # without waits for other ranks


class UsualStep(msgspec.Struct, frozen=True, kw_only=True):
    """The typical step at the begin of a generation, with which later ones are compared."""

    generation: int
    topology: Topology
    seconds: float  # mean over the ranks
    samples: float | None = None  # sum over the replicas; None: not counted
    tokens: float | None = None


LOSSES = (
    "straggler_seconds",
    "imbalance_seconds",
    "slow_link_seconds",
    "peer_wait_seconds",
    "bubble_excess_seconds",
)


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One finished optimizer step of the whole job."""

    generation: int
    step: int
    started_ns: int  # CLOCK_REALTIME, earliest rank
    duration_seconds: float  # latest end - earliest start
    mean_started_ns: int | None = None  # mean over the ranks; None: not known
    loss: float | None = None
    gradient_norm: float | None = None
    ranks: list[RankStep] = []
    bubbles: list[StageBubble] = []
    slowest_rank: int | None = None
    # Stored once the ranks are no longer listed:
    means: StepMeans | None = None
    slowest_slowdown: float | None = None
    goodput: StepGoodput | None = None
    # Sum over the replicas; None: not counted.
    samples: int | None = None
    tokens: int | None = None
    skipped: int = 0  # short steps before it that were not analyzed, and for which it stands
    skipped_seconds: float = 0.0  # that they took

    @property
    def mean_seconds(self) -> float:
        """Return the mean over the ranks of their own step times.

        Where each rank's steps follow one another, so do the means, however far one rank is ahead.
        """
        ranks = self.ranks
        return fmean(rank.step_seconds for rank in ranks) if ranks else self.duration_seconds

    @property
    def goodput_ratio(self) -> float | None:
        """Return the time that the step needed on healthy peers over its duration.

        None if it is not known, or while the ranks are listed.
        """
        needed, means = self.goodput, self.means
        if needed is None or means is None or self.duration_seconds <= 0:
            return None
        seconds = needed.compute_seconds + needed.communication_seconds + needed.bubble_seconds
        return (seconds + means.optimizer_seconds) / self.duration_seconds


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the rank that uses most. None: not measured."""

    rank: int
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None  # its state
    activations_bytes: int | None = None  # what is left of the peak
    allocated_bytes: int | None = None  # on the device, at the end of a step
    reserved_bytes: int | None = None
    peak_bytes: int | None = None  # most allocated
    fragmentation_ratio: float | None = None  # free parts of blocks in use over reserved
    after_forward_bytes: int | None = None
    after_backward_bytes: int | None = None
    after_optimizer_bytes: int | None = None


class RankEfficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of one rank over the recent steps, as shares of its step time."""

    rank: int
    exposed_communication_ratio: float
    overlapped_communication_ratio: float
    peak_bytes: int | None = None  # most allocated on its device


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The efficiency of a job over its recent steps. None: not known."""

    steps: int = 0
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    counted_from: str | None = None  # how samples and tokens are recognized
    model_flops_per_second: float | None = None  # sum over the ranks
    peak_flops_per_second: float | None = None  # peak of one device
    mfu_ratio: float | None = None
    mfu_unknown: str | None = None  # why the MFU is not known
    exposed_communication_ratio: float | None = None  # share of the step time of the ranks
    overlapped_communication_ratio: float | None = None
    memory: MemoryUse | None = None
    ranks: list[RankEfficiency] = []


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The job's wall time by part, in seconds; the parts sum to `wall_seconds`.

    Within steps, parts are means over ranks; compute, communication and bubble are what the steps
    need, the lines of `StepGoodput` what they lose. `lost_seconds`: steps that a restart repeated
    (they are not part of the others). `restart_seconds`: from the last step before a restart to the
    first one after it. `startup_seconds`: from creation to the first step. `idle_seconds`: the
    rest.
    """

    wall_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    bubble_seconds: float = 0.0
    straggler_seconds: float = 0.0
    imbalance_seconds: float = 0.0
    slow_link_seconds: float = 0.0
    peer_wait_seconds: float = 0.0
    bubble_excess_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0
    startup_seconds: float = 0.0
    idle_seconds: float = 0.0
    # compute, optimizer, communication and bubble, as needed on healthy peers, over wall
    goodput_ratio: float | None = None
    ettr_ratio: float | None = None  # steps that count, without their checkpoints, over wall
    useful_steps: int = 0
    lost_steps: int = 0
    samples: int | None = None  # sum over the useful steps; None: not counted
    tokens: int | None = None
    efficiency: Efficiency = Efficiency()  # over the recent steps
