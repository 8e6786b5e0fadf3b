"""The shape of a synthetic job: topology, schedule, and durations of operations without faults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_wire.topology import Topology

# Most trials use small jobs: they are cheap to compute, and few peers make detection harder.
_WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
_WORLD_WEIGHTS = (0.26, 0.26, 0.22, 0.14, 0.06, 0.03, 0.02, 0.01)
_SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Lengths:
    """The spread of the sequence lengths of microbatches.

    The share `attention` of the compute time grows with the sum of squared lengths, the rest with
    the number of tokens.
    """

    tokens_spread: float  # largest / smallest sum of lengths
    squares_spread: float  # largest / smallest sum of squared lengths
    attention: float
    given: bool = True  # whether the training script reports them to the hooks
    tokens: int = 8192
    typical: int = 2048  # length of one sequence

    def draw(
        self, chance: np.random.Generator, size: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and sums of squared lengths of microbatches; arrays of shape `size`."""
        tokens = self.tokens * _within(chance, self.tokens_spread, size)
        squares = tokens * self.typical * _within(chance, self.squares_spread, size)
        return tokens.astype(np.uint64), squares.astype(np.uint64)

    def factor(self, tokens: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return compute time relative to a typical microbatch."""
        by_tokens = tokens / self.tokens
        by_squares = squares / (self.tokens * self.typical)
        result: np.ndarray = (1.0 - self.attention) * by_tokens + self.attention * by_squares
        return result


def _within(chance: np.random.Generator, spread: float, size: tuple[int, ...]) -> np.ndarray:
    """Draw log-uniform factors with mean 1, so that the spread alone does not slow the job."""
    half = float(np.log(spread)) / 2.0
    mean = np.sinh(half) / half if half else 1.0
    factors: np.ndarray = np.exp(chance.uniform(-half, half, size)) / mean
    return factors


@dataclass(frozen=True, slots=True)
class JobShape:
    """The constants of a job. Seconds are per microbatch unless noted otherwise."""

    topology: Topology
    schedule: str
    virtual: int  # chunks of the model per rank
    microbatches: int
    ranks_per_node: int
    layer_seconds: float  # forward of one layer
    backward_ratio: float  # backward / forward time
    stage_layers: tuple[int, ...]  # per part of the model (part = chunk * pp + stage)
    head_seconds: float  # extra forward time of the last part
    near_transfer_seconds: float  # between ranks of one node
    far_transfer_seconds: float
    tensor_collective_seconds: float
    reduction_seconds: float  # data-parallel, per step
    optimizer_seconds: float
    data_seconds: float
    checkpoint_every: int  # steps; 0: never
    checkpoint_seconds: float
    zero: bool
    lengths: Lengths | None

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def node_count(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    def node_number(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def node(self, rank: int) -> str:
        return f"node-{self.node_number(rank)}"

    def on_node(self, number: int) -> range:
        first = number * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.world_size))

    def forward_seconds(self, part: int) -> float:
        extra = self.head_seconds if part == len(self.stage_layers) - 1 else 0.0
        return self.layer_seconds * self.stage_layers[part] + extra

    @property
    def text(self) -> str:
        axes = self.topology
        spread = ""
        if self.lengths is not None:
            note = "" if self.lengths.given else " (not reported)"
            spread = f", lengths {self.lengths.squares_spread:.1f}x{note}"
        return (
            f"dp{axes.dp} pp{axes.pp} tp{axes.tp} {self.schedule} m{self.microbatches} "
            f"v{self.virtual}, {self.ranks_per_node} per node{spread}"
        )

    @property
    def metadata(self) -> dict[str, str]:
        return {
            "schedule": self.schedule,
            "microbatches": str(self.microbatches),
            "virtual_stages": str(self.virtual),
            "stage_layers": ",".join(map(str, self.stage_layers)),
            "zero": "1" if self.zero else "0",
        }


def draw_shape(
    chance: np.random.Generator, largest: int = 1024, *, pipeline: bool = False
) -> JobShape:
    """Draw a job of at most `largest` ranks, with at least two stages if `pipeline` is set."""
    sizes = [size for size in _WORLD_SIZES if size <= largest] or [_WORLD_SIZES[0]]
    weights = np.array(_WORLD_WEIGHTS[: len(sizes)])
    world = int(chance.choice(sizes, p=weights / weights.sum()))
    topology = _draw_topology(chance, world, pipeline)
    schedule = str(chance.choice(_SCHEDULES)) if topology.pp > 1 else "1f1b"
    virtual = 2 if schedule == "interleaved" else 1
    microbatches = int(topology.pp * chance.integers(1, 4)) if topology.pp > 1 else 4
    layer_seconds = float(np.exp(chance.uniform(np.log(0.002), np.log(0.015))))
    layers = int(chance.integers(2, 7))
    forward = layer_seconds * layers
    far = forward * float(chance.uniform(0.01, 0.05))
    lengths = None
    if chance.random() < 0.4:
        lengths = Lengths(
            tokens_spread=float(chance.uniform(1.0, 1.5)),
            squares_spread=float(chance.uniform(1.0, 3.0)),
            attention=float(chance.uniform(0.1, 0.5)),
            given=bool(chance.random() < 0.7),
        )
    busy = 3.0 * forward * virtual * microbatches
    return JobShape(
        topology=topology,
        schedule=schedule,
        virtual=virtual,
        microbatches=microbatches,
        ranks_per_node=int(chance.choice([2, 4, 8] if world <= 64 else [8])),
        layer_seconds=layer_seconds,
        backward_ratio=float(chance.uniform(1.8, 2.2)),
        stage_layers=(layers,) * (topology.pp * virtual),
        head_seconds=forward * float(chance.uniform(0.0, 0.06)),
        near_transfer_seconds=far * float(chance.uniform(0.1, 0.3)),
        far_transfer_seconds=far,
        tensor_collective_seconds=forward * float(chance.uniform(0.02, 0.08)),
        reduction_seconds=busy * float(chance.uniform(0.02, 0.10)),
        optimizer_seconds=busy * float(chance.uniform(0.005, 0.02)),
        data_seconds=busy * float(chance.uniform(0.0005, 0.005)),
        checkpoint_every=int(chance.choice([0, 25, 60])),
        checkpoint_seconds=busy * float(chance.uniform(0.1, 1.0)),
        zero=bool(topology.dp > 1 and chance.random() < 0.3),
        lengths=lengths,
    )


def _draw_topology(chance: np.random.Generator, world: int, pipeline: bool) -> Topology:
    while True:
        tp = int(chance.choice([1, 2, 4, 8]))
        pp = int(chance.choice([2, 4, 8] if pipeline else [1, 2, 4, 8]))
        dp, rest = divmod(world, tp * pp)
        if not rest and dp:
            return Topology(dp, pp, tp)
