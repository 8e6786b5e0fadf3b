"""Convert steps to what agents send: span blocks, state pages, group definitions.

Each node's clock is off by up to five milliseconds and drifts. Sometimes a ring is overrun before
its agent reads it, and spans are missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from paceline_evaluation.program import DATA, EXTRA, TENSOR, WORLD, ProgramSpan, StepProgram
from paceline_evaluation.shape import JobShape
from paceline_evaluation.timeline import Timeline
from paceline_wire.batch import RankDefined, RankState, SpanBlock
from paceline_wire.ring import GroupDefinition, StateView
from paceline_wire.spans import COMPUTE_OPS, NONE_16, NONE_32, WORDS, Flag

JOB = "job-evaluated"
GENERATION = 0
START_NS = 1_750_000_000_000_000_000
BOOT_OFFSET_NS = START_NS - 7_200_000_000_000  # CLOCK_REALTIME - CLOCK_MONOTONIC
_LARGEST_SKEW_NS = 5_000_000
_DRIFT = 2e-7  # clock drift of a node under NTP

Words = npt.NDArray[np.uint64]


class Emission:
    """The records of one job: add stretches in order, then read those of each step."""

    def __init__(
        self, shape: JobShape, program: StepProgram, chance: np.random.Generator, lost: float
    ) -> None:
        self.shape, self.program, self.chance, self.lost = shape, program, chance, lost
        topology = shape.topology
        self.skew_ns = chance.uniform(-_LARGEST_SKEW_NS, _LARGEST_SKEW_NS, shape.node_count)
        self.drift = chance.normal(0.0, _DRIFT, shape.node_count)
        self.heads = np.zeros(shape.world_size, dtype=np.int64)
        self._static = [self._words(stage) for stage in range(topology.pp)]
        self.increments = [self._increments(stage) for stage in range(topology.pp)]
        self._first = 0
        self._stretch: list[Words] = []  # by stage: (dp, tp, words, steps, rows)
        self._kept: list[npt.NDArray[np.bool_]] = []
        self._heads: list[npt.NDArray[np.int64]] = []

    def offset_ns(self, rank: int, at_seconds: float) -> int:
        """Return what the agent adds to CLOCK_MONOTONIC, which includes its node's clock error."""
        node = self.shape.node_number(rank)
        error_ns = self.skew_ns[node] + self.drift[node] * at_seconds * 1e9
        return BOOT_OFFSET_NS + int(error_ns)

    def definitions(self, rank: int) -> RankDefined:
        topology = self.shape.topology
        place = topology.coordinates(rank)
        tensor = [topology.rank(place.dp_rank, place.pp_rank, tp) for tp in range(topology.tp)]
        data = [topology.rank(dp, place.pp_rank, place.tp_rank) for dp in range(topology.dp)]
        everyone = list(range(topology.world_size))
        return RankDefined(
            time_ns=START_NS,
            job=JOB,
            generation=GENERATION,
            rank=rank,
            definitions=[
                GroupDefinition(TENSOR, "tp", tensor, axis="tp"),
                GroupDefinition(DATA, "dp", data, axis="dp"),
                GroupDefinition(WORLD, "world", everyone, axis="world"),
                GroupDefinition(EXTRA, "averages", data, axis="dp"),
            ],
        )

    # Spans

    def add_stretch(
        self,
        first: int,
        timeline: Timeline,
        begins: npt.NDArray[np.float64],
        lengths: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Add a stretch from step `first`. `begins`: seconds of the exchange before each step."""
        self._first = first
        self._stretch, self._kept, self._heads = [], [], []
        for stage, rows in enumerate(self.program.rows):
            start, end = timeline.start[stage], timeline.end[stage]
            exists = np.isfinite(end)
            moment = begins[None, :, None, None] + np.where(exists, start, 0.0)
            shape = (WORDS, *start.shape)
            words: Words = np.empty(shape, dtype=np.uint64)
            words[:] = self._static[stage][:, :, None, :, :]
            steps = np.arange(first, first + begins.size, dtype=np.uint64)
            words[2] |= steps[None, :, None, None]
            words[5] += self.increments[stage][:, None, None, None] * steps[None, :, None, None]
            words[6] = (moment * 1e9).astype(np.int64) + (START_NS - BOOT_OFFSET_NS)
            length = np.subtract(end, start, out=np.zeros(start.shape), where=exists)
            words[7] = (length * 1e9).astype(np.uint64)
            if lengths is not None:
                self._write_lengths(words, rows, lengths)
            self._index(stage, words, exists)

    def block(self, rank: int, step: int, at_seconds: float) -> SpanBlock:
        place = self.shape.topology.coordinates(rank)
        stage, number = place.pp_rank, step - self._first
        words = self._stretch[stage][place.dp_rank, place.tp_rank, :, number]
        kept = self._kept[stage][place.dp_rank, place.tp_rank, number]
        lost = 0
        if self.lost and self.chance.random() < self.lost:
            kept, lost = self._overrun(kept)
        self.heads[rank] = self._heads[stage][place.dp_rank, place.tp_rank, number]
        columns = words[:, kept].tobytes()
        return SpanBlock(JOB, GENERATION, rank, columns, self.offset_ns(rank, at_seconds), lost)

    def _overrun(self, kept: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], int]:
        """Drop the oldest of the step's records, as if they had been overwritten."""
        present = np.flatnonzero(kept)
        gone = int(self.chance.integers(1, max(2, present.size // 2)))
        kept = kept.copy()
        kept[present[:gone]] = False
        return kept, gone

    def _words(self, stage: int) -> Words:
        """Return the parts of the records that are the same in all steps: (words, rows, dp, tp)."""
        topology, rows = self.shape.topology, self.program.rows[stage]
        ranks = np.arange(self.shape.world_size).reshape(topology.pp, topology.dp, topology.tp)
        words: Words = np.zeros((WORDS, len(rows), topology.dp, topology.tp), dtype=np.uint64)
        for position, row in enumerate(rows):
            chunk = NONE_16 if row.action is None else row.action.chunk
            microbatch = NONE_32 if row.action is None else row.action.microbatch
            flags = int(Flag.ASYNC) if row.is_async else 0
            words[1, position] = int(row.op) | row.group << 16 | chunk << 32 | flags << 48
            words[2, position] = microbatch << 32
            words[3, position] = NONE_32 if row.peer_stage is None else ranks[row.peer_stage]
            words[4, position] = 0 if row.op in COMPUTE_OPS or not row.sequence else 1 << 24
            words[5, position] = row.sequence
        return words

    def _increments(self, stage: int) -> Words:
        """Return the increment of each row's sequence number per step."""
        rows = self.program.rows[stage]
        by_group: dict[int, int] = {}
        for row in rows:
            if row.group:
                by_group[row.group] = max(by_group.get(row.group, 0), row.sequence)
        return np.array([self._increment(stage, row, by_group) for row in rows], dtype=np.uint64)

    def _increment(self, stage: int, row: ProgramSpan, by_group: dict[int, int]) -> int:
        if row.group:
            return by_group[row.group]
        if row.peer_stage is None:
            return 0
        pair = (stage, row.peer_stage) if row.is_async else (row.peer_stage, stage)
        return self.program.counts[pair]

    def _write_lengths(
        self, words: Words, rows: list[ProgramSpan], lengths: tuple[np.ndarray, np.ndarray]
    ) -> None:
        for position, row in enumerate(rows):
            if row.op in COMPUTE_OPS and row.action is not None:
                for word, values in zip((4, 5), lengths, strict=True):
                    words[word, position] = values[:, :, row.action.microbatch, None]

    def _index(self, stage: int, words: Words, exists: npt.NDArray[np.bool_]) -> None:
        """Number the existing records and store them by rank."""
        kept = exists.transpose(2, 3, 1, 0)  # dp, tp, steps, rows
        dp, tp = kept.shape[:2]
        ranks = np.arange(self.shape.world_size).reshape(-1, dp, tp)[stage]
        written = kept.reshape(dp, tp, -1).cumsum(axis=-1).reshape(kept.shape)
        written = written + self.heads[ranks][:, :, None, None]
        words[0] = (written - 1).transpose(3, 2, 0, 1).astype(np.uint64)
        self._stretch.append(np.ascontiguousarray(words.transpose(3, 4, 0, 2, 1)))
        self._kept.append(np.ascontiguousarray(kept))
        self._heads.append(written[..., -1])

    # State pages

    def state(self, rank: int, step: int, at_seconds: float, loss: float | None) -> RankState:
        """Return the state of a rank that has just finished `step`."""
        view = StateView(
            head=int(self.heads[rank]),
            step=step + 1,
            step_started_ns=int(at_seconds * 1e9) + START_NS - BOOT_OFFSET_NS,
            microbatch=None,
            status="running",
            loss_step=step,
            loss=loss,
            gradient_norm=None,
            evaluation_step=None,
            evaluation_loss=None,
            frames=[],
            groups=[],
            peers=[],
        )
        return self.page(rank, view, at_seconds)

    def page_time_ns(self, rank: int, at_seconds: float) -> int:
        """Return the time on CLOCK_REALTIME of the rank's node."""
        monotonic_ns = int(at_seconds * 1e9) + START_NS - BOOT_OFFSET_NS
        return monotonic_ns + self.offset_ns(rank, at_seconds)

    def page(
        self,
        rank: int,
        view: StateView,
        at_seconds: float,
        process_state: str = "S",
        cpu_seconds: float | None = None,
    ) -> RankState:
        offset_ns = self.offset_ns(rank, at_seconds)
        return RankState(
            time_ns=self.page_time_ns(rank, at_seconds),
            job=JOB,
            generation=GENERATION,
            rank=rank,
            clock_offset_ns=offset_ns,
            view=view,
            process_state=process_state,
            cpu_seconds=cpu_seconds,
        )


def all_ranks(shape: JobShape) -> Iterator[tuple[int, range]]:
    """Yield each node and its ranks."""
    for node in range(shape.node_count):
        yield node, shape.on_node(node)
