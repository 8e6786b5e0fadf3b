"""The faults of the synthetic arm: their effect on a job and the subject of the correct finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from paceline_evaluation.shape import JobShape, Lengths

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KINDS = (
    "none",
    "slow_rank",
    "slow_node",
    "slow_link",
    "stage_imbalance",
    "sequence_variance",
    "data_stall",
    "gc",
    "transient_stall",
    "two_faults",
    "hang",
    "crash",
    "stalled_microbatch",
    "slow_creep",
    "late_link",
)
SYNTHETIC = ("stalled_microbatch", "slow_creep", "late_link")  # only the synthetic arm has them
CHRONIC = ("stage_imbalance", "sequence_variance", "gc")  # part of the job from its first step
# Weaker faults are scored separately: they are not worth a restart.
COUNTED_MAGNITUDE = 0.10

RANK_CAUSES = ("thermal", "power", "pcie", "numa", "cpu", "memory", "ecc", "unknown")
NODE_CAUSES = ("thermal", "power", "cpu", "memory", "unknown")
LINK_CAUSES = ("nic errors", "nic rate", "congestion", "unknown")
DATA_CAUSES = ("disk", "unknown")
STALL_CAUSES = ("cpu", "memory", "unknown")
LATE_LINK_PAST = 16  # least number of reductions before the link becomes slow
HANG_CAUSES = ("host", "device", "mismatch")  # side on which the rank is blocked


@dataclass(frozen=True, slots=True)
class HiddenTraffic:
    """A reduction among replicas that first occurs after some steps, such as an average."""

    first_step: int
    every: int  # steps

    def is_active(self, steps: Ints) -> Bools:
        due: Bools = (steps >= self.first_step) & ((steps - self.first_step) % self.every == 0)
        return due


@dataclass(frozen=True, slots=True)
class TrialFault:
    """One fault of a job. Ranks are global."""

    kind: str
    onset_step: int
    magnitude: float  # slowdown of the subject, or the cost as a share of the step; 0.2: 20%
    steps: int | None = None  # None: permanent
    ranks: tuple[int, ...] = ()
    node: int | None = None  # node number
    stage: int | None = None
    link: tuple[int, int] | None = None
    cause: str = "unknown"  # as the node's telemetry shows it
    factor: float = 1.0  # multiplies the durations of its operations
    seconds: float = 0.0  # added to the durations of its operations
    ramp_steps: int = 0  # number of steps over which the fault grows linearly to its full size
    traffic: HiddenTraffic | None = None  # the traffic of a late link
    way: str = ""  # how a fault of the foreign arm occurs
    headline: str = ""  # text that the summary of the correct finding has
    counted_from: float = COUNTED_MAGNITUDE

    def is_active(self, step: int) -> bool:
        """Return whether the fault is present in `step`."""
        after = self.steps is None or step < self.onset_step + self.steps
        return self.onset_step <= step and after

    def share(self, steps: Ints) -> Floats:
        """Return its share of the full size in each of the steps, 0..1."""
        ramp = (steps - self.onset_step + 1) / max(self.ramp_steps, 1)
        return np.clip(ramp, 0.0, 1.0)

    @property
    def counts(self) -> bool:
        return self.magnitude >= self.counted_from

    @property
    def counted_step(self) -> int:
        """First step in which the fault costs at least COUNTED_MAGNITUDE."""
        if not self.ramp_steps:
            return self.onset_step
        share = COUNTED_MAGNITUDE / self.magnitude
        return self.onset_step + math.ceil(round(share * self.ramp_steps, 6)) - 1


@dataclass(frozen=True, slots=True)
class CommonChange:
    """The compute time of all ranks from a step on: no fault, and a report of a rise is correct."""

    step: int
    factor: float  # relative to before


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The job of a trial and its faults."""

    shape: JobShape
    faults: tuple[TrialFault, ...] = field(default=())


def draw_rank(chance: np.random.Generator, shape: JobShape) -> int:
    return int(chance.integers(shape.world_size))


def slow_rank(
    chance: np.random.Generator, shape: JobShape, onset: int, least: float = 0.05
) -> TrialFault:
    rank, magnitude = draw_rank(chance, shape), float(chance.uniform(least, 0.5))
    return TrialFault(
        "slow_rank",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        cause=str(chance.choice(RANK_CAUSES)),
        factor=1.0 + magnitude,
    )


def slow_node(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    node = int(chance.integers(shape.node_count))
    magnitude = float(chance.uniform(0.10, 0.5))
    return TrialFault(
        "slow_node",
        onset,
        magnitude,
        ranks=tuple(shape.on_node(node)),
        node=node,
        cause=str(chance.choice(NODE_CAUSES)),
        factor=1.0 + magnitude,
    )


def slow_link(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Return a slow link: slow transfers between a rank and its peer in the next stage, both
    ways."""
    topology = shape.topology
    stage = int(chance.integers(topology.pp - 1))
    place = topology.coordinates(draw_rank(chance, shape))
    source = topology.rank(place.dp_rank, stage, place.tp_rank)
    target = topology.rank(place.dp_rank, stage + 1, place.tp_rank)
    is_far = shape.node(source) != shape.node(target)
    cause = str(chance.choice(LINK_CAUSES)) if is_far else "unknown"
    magnitude = float(chance.uniform(0.12, 0.5))
    node = shape.node_number(source)
    return TrialFault("slow_link", onset, magnitude, link=(source, target), node=node, cause=cause)


def data_stall(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    rank, magnitude = draw_rank(chance, shape), float(chance.uniform(0.10, 0.6))
    return TrialFault(
        "data_stall",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        cause=str(chance.choice(DATA_CAUSES)),
    )


def transient_stall(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    rank, magnitude = draw_rank(chance, shape), float(chance.uniform(0.3, 2.0))
    return TrialFault(
        "transient_stall",
        onset,
        magnitude,
        steps=int(chance.integers(1, 4)),
        ranks=(rank,),
        node=shape.node_number(rank),
    )


def stalled_microbatch(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Return a stall of one operation per step, each time a different one."""
    rank, magnitude = draw_rank(chance, shape), float(chance.uniform(0.12, 0.5))
    return TrialFault(
        "stalled_microbatch",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        cause=str(chance.choice(STALL_CAUSES)),
    )


def slow_creep(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Return a rank that slows down by half a percent per step, up to 30%."""
    rank, magnitude = draw_rank(chance, shape), 0.3
    return TrialFault(
        "slow_creep",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        factor=1.0 + magnitude,
        ramp_steps=round(magnitude / float(chance.uniform(0.004, 0.006))),
    )


def late_link(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Return a slow link that is used late: a second reduction starts after some steps and slows
    down later."""
    topology = shape.topology
    place = topology.coordinates(draw_rank(chance, shape))
    ranks = tuple(
        topology.rank(replica, place.pp_rank, place.tp_rank) for replica in range(topology.dp)
    )
    every = int(chance.choice([1, 1, 2]))
    first = int(chance.integers(6, max(7, onset - LATE_LINK_PAST * every)))
    return TrialFault(
        "late_link",
        onset,
        float(chance.uniform(0.12, 0.5)),
        ranks=ranks,
        stage=place.pp_rank,
        traffic=HiddenTraffic(first, every),
    )


def gc_pauses(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """Return GC pauses: each rank collects garbage at its own times while all other ranks wait."""
    return TrialFault("gc", onset, float(chance.uniform(0.12, 0.4)))


def uneven_stages(chance: np.random.Generator, shape: JobShape) -> tuple[JobShape, int]:
    """Return the shape with more layers in one part of the model, and the number of that part."""
    parts = len(shape.stage_layers)
    part, layers = int(chance.integers(parts)), list(shape.stage_layers)
    layers[part] += max(1, round(layers[part] * float(chance.uniform(0.25, 0.7))))
    return replace(shape, stage_layers=tuple(layers)), part


def uneven_sequences(chance: np.random.Generator, shape: JobShape) -> JobShape:
    spread = float(chance.uniform(2.0, 3.0))
    return replace(
        shape,
        lengths=Lengths(
            tokens_spread=float(chance.uniform(1.0, 1.6)),
            squares_spread=spread * 2.0,
            attention=float(chance.uniform(0.4, 0.8)),
        ),
    )
