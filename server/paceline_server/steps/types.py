"""What the step model and the ledger produce. Seconds throughout; ratios are 0..1."""

from __future__ import annotations

import msgspec


class StageBubble(msgspec.Struct, frozen=True):
    """Idle time of one pipeline stage within the pipeline phase of one step.

    Idle is what the stage waits for others, or lies still though nothing is missing; the own time
    of a transfer is not, as long as it is short (see `steps.bubbles`). The shares sum to
    `excess_ratio`; one is negative where the stage idles less for it, as the slowest stage does.
    None: too little was recorded to tell.
    """

    stage: int
    measured_ratio: float
    theory_ratio: float | None  # None: the schedule is not known
    excess_ratio: float | None = None  # measured - theory
    imbalance_ratio: float | None = None  # stages do not take equally long
    straggler_ratio: float | None = None  # ranks of a stage do not
    variation_ratio: float | None = None  # microbatches do not: sequence lengths, jitter
    transfer_ratio: float | None = None  # sends and receives take long
    data_ratio: float | None = None  # a stage had no data yet
    launch_ratio: float | None = None  # nothing was missing, yet its host started late
    other_ratio: float | None = None


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One rank's share of one step. The parts sum to the rank's step time, `other` included."""

    rank: int
    step_seconds: float
    self_seconds: float  # compute without the waits nested in it: what peers are compared by
    compute_seconds: float
    communication_seconds: float  # exposed: the host was blocked in it
    wait_seconds: float  # the part of communication before the last participant arrived
    bubble_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float
    gc_seconds: float
    slowdown: float | None  # self time over its peers' (same stage); None: no peers


class StepMeans(msgspec.Struct, frozen=True, array_like=True):
    """Over the ranks of one step."""

    compute_seconds: float
    communication_seconds: float
    wait_seconds: float
    bubble_seconds: float
    data_wait_seconds: float
    optimizer_seconds: float
    checkpoint_seconds: float


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One finished optimizer step of the whole job."""

    generation: int
    step: int
    started_ns: int  # CLOCK_REALTIME, earliest rank
    duration_seconds: float  # latest end - earliest start
    loss: float | None = None
    gradient_norm: float | None = None
    ranks: list[RankStep] = []
    bubbles: list[StageBubble] = []
    slowest_rank: int | None = None
    # What is kept of the ranks when they are no longer listed.
    means: StepMeans | None = None
    slowest_slowdown: float | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where the job's wall time went, in seconds; the parts sum to `wall_seconds`.

    Within steps, parts are means over ranks. `lost_seconds`: steps whose work was thrown away by
    a restart (they leave the other parts). `restart_seconds`: from the end of progress to the
    first new step. `startup_seconds`: from creation to the first step. `idle_seconds`: the rest.
    """

    wall_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    bubble_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0
    startup_seconds: float = 0.0
    idle_seconds: float = 0.0
    goodput_ratio: float | None = None  # (compute + optimizer + communication + bubble) / wall
    useful_steps: int = 0
    lost_steps: int = 0
