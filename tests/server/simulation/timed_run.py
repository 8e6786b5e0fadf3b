"""A job simulated only as step timings: thousands of steps take a second.

Compute times are as in the noisiest jobs of `paceline evaluate`: log-normal jitter of each
operation, rank and step, chronic differences, drift of nodes, rare operations of several times
their usual duration, and sequence lengths. Transfers and collectives are drawn in the same way.
Waits are left out: detectors of self times and transfer times do not read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.telemetry import Telemetry
from paceline_server.policy import Policy
from paceline_server.steps.groups import Groups
from paceline_server.steps.timing import (
    CollectiveTimes,
    ComputeTimes,
    RankTimes,
    StepTiming,
    TransferTimes,
)
from paceline_wire.batch import RankProfile
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

T0 = 1_700_000_000_000_000_000
FORWARD_SECONDS = 0.020
TRANSFER_SECONDS = 0.0004
REDUCTION_SECONDS = 0.01


@dataclass
class Noise:
    operation: float = 0.03
    step: float = 0.01
    chronic: float = 0.01
    drift: float = 0.02
    outliers: float = 0.005  # share of all operations that take 2-5 times as long
    transfer: float = 0.1
    host: float = 0.0  # noise that all ranks of a step share


@dataclass
class TimedRun:
    """A simulated run.

    `advance` passes steps to the detectors; faults are attributes that a test sets.
    """

    topology: Topology
    seed: int
    noise: Noise = field(default_factory=Noise)
    microbatches: int = 8
    ranks_per_node: int = 2
    lengths: float = 1.0  # largest over smallest squares of a microbatch; 1: not given
    policy: Policy = field(default_factory=Policy)
    step_ns: int = 600_000_000  # from the start of one step to that of the next

    def __post_init__(self) -> None:
        world = self.topology.world_size
        self.chance = np.random.default_rng(self.seed)
        self.generation = Generation(
            job="job",
            number=0,
            topology=self.topology,
            nodes={rank: f"node-{rank // self.ranks_per_node}" for rank in range(world)},
            gpus={},
            started_ns=T0,
        )
        self.telemetry = Telemetry()
        self.profiles: dict[int, list[RankProfile]] = {}
        self.slow: dict[int, float] = {}
        self.slow_links: dict[tuple[int, int], float] = {}
        self.slow_groups: dict[int, float] = {}
        self.late_from: int | None = None  # step in which each group's second reduction begins
        self.late_every = 1
        self.slow_late_groups: dict[int, float] = {}
        self.stalled: dict[int, float] = {}  # seconds added to one operation of a step
        self.host: dict[int, float] = {}  # seconds added beside the operations of a step
        self.longer = 0.0  # seconds that are added to the step of all ranks
        self.lost = 0.0  # share of the compute rows that are missing
        self.silent: set[int] = set()  # ranks without data
        self.step = 0
        self.findings: list[Finding] = []
        self._chronic = np.exp(self.chance.normal(0.0, self.noise.chronic, world))
        nodes = -(-world // self.ranks_per_node)
        self._host_chance = np.random.default_rng(self.seed + 1)
        self._phase = self.chance.uniform(0.0, 2 * np.pi, nodes)
        self._period = self.chance.uniform(150.0, 600.0, nodes)
        self._detectors: list[Detector] = []

    def watch(self, *detectors: type[Detector]) -> TimedRun:
        self._detectors = [detector(self.generation, self.policy) for detector in detectors]
        return self

    def advance(self, steps: int) -> list[Finding]:
        """Return the findings of the detectors."""
        before = len(self.findings)
        for _ in range(steps):
            seen = self.observe(self.timing())
            for detector in self._detectors:
                self.findings += detector.update(seen)
            self.step += 1
        return self.findings[before:]

    def observe(self, *timings: StepTiming) -> Observation:
        return Observation(
            now_ns=T0 + self.step * self.step_ns + 700_000_000,
            steps=[],
            exits=[],
            device_events=[],
            ranks=dict[int, LiveRank](),
            last_seen_ns={},
            exited={},
            losses={},
            telemetry=self.telemetry,
            groups=Groups(self.topology.world_size),
            timings=timings,
            profiles=self.profiles,
        )

    def timing(self) -> StepTiming:
        compute = self._compute()
        return StepTiming(
            step=self.step,
            ranks=self._ranks(compute),
            compute=compute,
            transfers=self._transfers(),
            collectives=self._collectives(),
            groups=dict(enumerate(self.groups())),
        )

    def groups(self) -> list[tuple[int, ...]]:
        """Return the data-parallel groups."""
        topology = self.topology
        return [
            tuple(topology.rank(dp, pp, tp) for dp in range(topology.dp))
            for pp in range(topology.pp)
            for tp in range(topology.tp)
        ]

    def links(self) -> list[tuple[int, int]]:
        """Return the links between neighboring stages, in both directions."""
        topology = self.topology
        forward = [
            (topology.rank(dp, pp, tp), topology.rank(dp, pp + 1, tp))
            for dp in range(topology.dp)
            for pp in range(topology.pp - 1)
            for tp in range(topology.tp)
        ]
        return forward + [(target, source) for source, target in forward]

    def _compute(self) -> ComputeTimes:
        world, each = self.topology.world_size, 2 * self.microbatches
        rank = np.repeat(np.arange(world), each)
        op = np.tile(np.repeat([int(Op.FORWARD), int(Op.BACKWARD)], self.microbatches), world)
        microbatch = np.tile(np.arange(self.microbatches), 2 * world)
        own = self._chronic * self._jitter(self.noise.step, world)
        own *= self._jitter(self.noise.host, 1)
        node = np.arange(world) // self.ranks_per_node
        turn = 2 * np.pi * self.step / self._period + self._phase
        own *= 1.0 + self.noise.drift * np.sin(turn[node])
        for slow, slowdown in self.slow.items():
            own[slow] *= slowdown
        seconds = FORWARD_SECONDS * np.where(op == Op.BACKWARD, 2.0, 1.0) * own[rank]
        seconds *= self._jitter(self.noise.operation, rank.size)
        outliers = self.chance.random(rank.size) < self.noise.outliers
        seconds[outliers] *= self.chance.uniform(2.0, 5.0, int(outliers.sum()))
        tokens, squared = np.zeros((2, rank.size), dtype=np.int64)
        if self.lengths > 1.0:
            tokens, squared = self._drawn_lengths(rank, microbatch)
            seconds *= 0.6 * tokens / 8192 + 0.4 * squared / (8192 * 2048)
        for stalled, more in self.stalled.items():
            seconds[self.chance.choice(np.flatnonzero(rank == stalled))] += more
        kept = (self.chance.random(rank.size) >= self.lost) & ~np.isin(rank, list(self.silent))
        zero = np.zeros(int(kept.sum()), dtype=np.int64)
        return ComputeTimes(
            rank=rank[kept],
            op=op[kept],
            microbatch=microbatch[kept],
            chunk=zero,
            start_ns=zero + T0,
            end_ns=zero + T0,
            self_seconds=seconds[kept],
            tokens=tokens[kept],
            squared_tokens=squared[kept],
        )

    def _drawn_lengths(
        self, rank: np.ndarray, microbatch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw lengths; the stages and tensor peers of a replica work on the same microbatches."""
        half = np.log(self.lengths) / 2.0
        size = (self.topology.dp, self.microbatches)
        tokens = 8192 * np.exp(self.chance.uniform(-half / 2, half / 2, size))
        squared = tokens * 2048 * np.exp(self.chance.uniform(-half, half, size))
        replica = rank // self.topology.tp % self.topology.dp
        place = (replica, microbatch)
        return tokens[place].astype(np.int64), squared[place].astype(np.int64)

    def _ranks(self, compute: ComputeTimes) -> RankTimes:
        world = self.topology.world_size
        ranks = np.array([rank for rank in range(world) if rank not in self.silent])
        own = np.bincount(compute.rank, compute.self_seconds, world)[ranks]
        zero = np.zeros(ranks.size)
        start = np.full(ranks.size, T0 + self.step * self.step_ns)
        seconds = np.full(ranks.size, 1.25 * own.max(initial=0.0) + self.longer)
        return RankTimes(
            rank=ranks,
            start_ns=start,
            end_ns=start + (seconds * 1e9).astype(np.int64),
            step_seconds=seconds,
            self_seconds=own,
            compute_seconds=own,
            communication_seconds=zero,
            wait_seconds=seconds - own,
            bubble_seconds=zero,
            data_wait_seconds=zero,
            optimizer_seconds=zero,
            checkpoint_seconds=zero,
            evaluation_seconds=zero,
            evaluation_wait_seconds=zero,
            gc_seconds=zero,
            host_seconds=self._host_seconds(ranks, own),
            overlapped_seconds=zero,
            routed_bytes=np.zeros_like(ranks),
        )

    def _host_seconds(self, ranks: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Return 3% of the compute time, with a long tail: one step in 20 takes five times that."""
        usual = self._host_chance.lognormal(np.log(0.03), 0.4, ranks.size)
        usual[self._host_chance.random(ranks.size) < 0.05] *= 5.0
        added = np.array([self.host.get(rank, 0.0) for rank in ranks.tolist()])
        return own * usual + added

    def _transfers(self) -> TransferTimes:
        links = self.links()
        ends = np.array(links, dtype=np.int64).reshape(-1, 2)
        source = np.repeat(ends[:, 0], self.microbatches)
        destination = np.repeat(ends[:, 1], self.microbatches)
        factor = [self.slow_links.get(link, 1.0) for link in links]
        near = ends[:, 0] // self.ranks_per_node == ends[:, 1] // self.ranks_per_node
        base = TRANSFER_SECONDS * np.where(near, 0.2, 1.0) * np.array(factor)
        seconds = np.repeat(base, self.microbatches)
        seconds = seconds * self._jitter(self.noise.transfer, source.size)
        zero = np.zeros(source.size, dtype=np.int64)
        forward = np.repeat(ends[:, 0] < ends[:, 1], self.microbatches)
        return TransferTimes(
            source=source,
            destination=destination,
            op=np.where(forward, int(Op.FORWARD_SEND), int(Op.BACKWARD_SEND)),
            microbatch=np.tile(np.arange(self.microbatches), len(links)),
            chunk=zero,
            bytes=zero + (1 << 24),
            send_start_ns=zero + T0,
            send_end_ns=zero + T0,
            receive_start_ns=zero + T0,
            end_ns=zero + T0,
            transfer_seconds=seconds,
        )

    def _collectives(self) -> CollectiveTimes:
        count = len(self.groups()) if self.topology.dp > 1 else 0
        first = self.late_from
        is_due = first is not None and self.step >= first
        is_due = is_due and not (self.step - (first or 0)) % self.late_every
        kinds = [(Op.ALL_REDUCE, self.slow_groups)]
        kinds += [(Op.ALL_GATHER, self.slow_late_groups)] if is_due else []
        factor = np.array([slow.get(group, 1.0) for _, slow in kinds for group in range(count)])
        rows = len(kinds) * count
        zero = np.zeros(rows, dtype=np.int64)
        return CollectiveTimes(
            group=np.tile(np.arange(count), len(kinds)),
            op=np.repeat([int(op) for op, _ in kinds], count),
            sequence=zero + self.step + 1,
            bytes=zero + (1 << 28),
            participants=zero + self.topology.dp,
            last_rank=zero,
            transfer_seconds=REDUCTION_SECONDS * factor * self._jitter(0.05, rows),
            spread_seconds=zero.astype(np.float64),
        )

    def _jitter(self, sigma: float, size: int) -> np.ndarray:
        made: np.ndarray = np.exp(self.chance.normal(0.0, sigma, size)) if sigma else np.ones(size)
        return made


def subjects(findings: Sequence[Finding]) -> list[tuple[str, int | None, str | None]]:
    """Return kind, rank and node of each finding."""
    return [(finding.kind, finding.rank, finding.node) for finding in findings]
