"""The faults of the synthetic arm: what each does to a job, and who is to be named for it."""

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
SYNTHETIC = ("stalled_microbatch", "slow_creep", "late_link")  # not of the real arm
CHRONIC = ("stage_imbalance", "sequence_variance", "gc")  # part of the job from its first step
# Below this, a fault is reported apart: nobody restarts a job for it.
COUNTED_MAGNITUDE = 0.10

RANK_CAUSES = ("thermal", "power", "pcie", "numa", "cpu", "memory", "ecc", "unknown")
NODE_CAUSES = ("thermal", "power", "cpu", "memory", "unknown")
LINK_CAUSES = ("nic errors", "nic rate", "congestion", "unknown")
DATA_CAUSES = ("disk", "unknown")
STALL_CAUSES = ("cpu", "memory", "unknown")
LATE_LINK_PAST = 16  # times that it was seen before it became slow, at least
HANG_CAUSES = ("host", "device", "mismatch")  # the side it is stuck on


@dataclass(frozen=True, slots=True)
class HiddenTraffic:
    """A reduction among replicas that nobody sees in the first steps: an average, a copy."""

    first_step: int
    every: int  # steps

    def flows(self, steps: Ints) -> Bools:
        due: Bools = (steps >= self.first_step) & ((steps - self.first_step) % self.every == 0)
        return due


@dataclass(frozen=True, slots=True)
class TrialFault:
    """One thing that is wrong with a job. Ranks are global."""

    kind: str
    onset_step: int
    magnitude: float  # slowdown of what is slow, or share of the step it costs; 0.2 = 20%
    steps: int | None = None  # None: it stays
    ranks: tuple[int, ...] = ()
    node: int | None = None  # number
    stage: int | None = None
    link: tuple[int, int] | None = None
    cause: str = "unknown"  # what the node's measurements show
    factor: float = 1.0  # what its operations' durations are multiplied by
    seconds: float = 0.0  # what is added to them
    ramp_steps: int = 0  # that it takes to come to its full size, evenly
    traffic: HiddenTraffic | None = None  # what a late link carries

    def holds(self, step: int) -> bool:
        after = self.steps is None or step < self.onset_step + self.steps
        return self.onset_step <= step and after

    def share(self, steps: Ints) -> Floats:
        """How much of it there is in each of the steps, 0..1."""
        ramp = (steps - self.onset_step + 1) / max(self.ramp_steps, 1)
        return np.clip(ramp, 0.0, 1.0)

    @property
    def counts(self) -> bool:
        return self.magnitude >= COUNTED_MAGNITUDE

    @property
    def counted_step(self) -> int:
        """The first step in which it is large enough to be told of."""
        if not self.ramp_steps:
            return self.onset_step
        share = COUNTED_MAGNITUDE / self.magnitude
        return self.onset_step + math.ceil(round(share * self.ramp_steps, 6)) - 1


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A trial's job and what will be wrong with it."""

    shape: JobShape
    faults: tuple[TrialFault, ...] = field(default=())


def some_rank(chance: np.random.Generator, shape: JobShape) -> int:
    return int(chance.integers(shape.world_size))


def slow_rank(
    chance: np.random.Generator, shape: JobShape, onset: int, least: float = 0.05
) -> TrialFault:
    rank, magnitude = some_rank(chance, shape), float(chance.uniform(least, 0.5))
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
    """Between one rank and its peer of the next stage, in both directions; tuned to its cost."""
    topology = shape.topology
    stage = int(chance.integers(topology.pp - 1))
    place = topology.coordinates(some_rank(chance, shape))
    source = topology.rank(place.dp_rank, stage, place.tp_rank)
    target = topology.rank(place.dp_rank, stage + 1, place.tp_rank)
    is_far = shape.node(source) != shape.node(target)
    cause = str(chance.choice(LINK_CAUSES)) if is_far else "unknown"
    magnitude = float(chance.uniform(0.12, 0.5))
    node = shape.node_number(source)
    return TrialFault("slow_link", onset, magnitude, link=(source, target), node=node, cause=cause)


def data_stall(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    rank, magnitude = some_rank(chance, shape), float(chance.uniform(0.10, 0.6))
    return TrialFault(
        "data_stall",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        cause=str(chance.choice(DATA_CAUSES)),
    )


def transient_stall(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    rank, magnitude = some_rank(chance, shape), float(chance.uniform(0.3, 2.0))
    return TrialFault(
        "transient_stall",
        onset,
        magnitude,
        steps=int(chance.integers(1, 4)),
        ranks=(rank,),
        node=shape.node_number(rank),
    )


def stalled_microbatch(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """One operation of each step, another each time; tuned to its cost."""
    rank, magnitude = some_rank(chance, shape), float(chance.uniform(0.12, 0.5))
    return TrialFault(
        "stalled_microbatch",
        onset,
        magnitude,
        ranks=(rank,),
        node=shape.node_number(rank),
        cause=str(chance.choice(STALL_CAUSES)),
    )


def slow_creep(chance: np.random.Generator, shape: JobShape, onset: int) -> TrialFault:
    """A rank that gets slower by half a percent in each step, to 30%."""
    rank, magnitude = some_rank(chance, shape), 0.3
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
    """A group of replicas whose reduction is first seen late, and slow later still."""
    topology = shape.topology
    place = topology.coordinates(some_rank(chance, shape))
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
    """Every rank collects when it pleases: each pause makes all others wait."""
    return TrialFault("gc", onset, float(chance.uniform(0.12, 0.4)))


def uneven_stages(chance: np.random.Generator, shape: JobShape) -> tuple[JobShape, int]:
    """The shape with layers moved to one part of the model, and that part."""
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
