"""The compute load of each rank in one step, relative to the load expected for its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline_server.detect.statistics.lengths import ExpectedCompute
from paceline_server.steps.breakdown import is_marked
from paceline_server.steps.timing import ComputeTimes, RankTimes, StepTiming
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# share cut off at either end, because a stall in one microbatch does not make a slow rank
TRIMMED = 0.25
# Share of its step that the own time of a rank must have. Compared with less, as in a step that an
# evaluation fills, any other step would be slow without limit.
_LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class ComputeLoad:
    """One step: `rank` and `ratios` have one row per sample, the others per rank (NaN: unknown)."""

    rank: Ints
    ratios: Floats  # self time over the expected time for its data
    total: Floats  # log of the ratio of all microbatches together
    self_seconds: Floats
    host_seconds: Floats  # beside them, as in `RankTimes`

    def typical(self) -> Floats:
        """Return, by rank, the log of the ratio of its typical microbatch."""
        return _typical(self.rank, np.log(self.ratios), self.total.size)

    def with_host(self) -> Floats:
        """Return, by rank, the log of all its own time over its time in microbatches."""
        levels: Floats = np.log1p(self.host_seconds / self.self_seconds)
        return levels


class ComputeLoads:
    """Measures the steps of one generation, in order, and learns their expected time."""

    def __init__(self, topology: Topology) -> None:
        self._world = topology.world_size
        self._expected = ExpectedCompute(topology)
        self._is_routed = False  # ranks received different sizes in an earlier step

    def measure(self, timing: StepTiming) -> ComputeLoad:
        rows = self._with_routing(_with_unhooked(timing, self._world), timing.ranks)
        self._expected.learn(rows)
        ratios = self._expected.ratios(rows)
        known = ratios > 0
        rank, ratios, seconds = rows.rank[known], ratios[known], rows.self_seconds[known]
        measured = np.bincount(rank, seconds, self._world)
        expected = np.bincount(rank, seconds / ratios, self._world)
        some = measured > 0
        total = np.full(self._world, np.nan)
        total[some] = np.log(measured[some] / expected[some])
        host = np.zeros(self._world)
        host[timing.ranks.rank] = timing.ranks.host_seconds
        return ComputeLoad(rank, ratios, total, np.where(some, measured, np.nan), host)

    def _with_routing(self, rows: ComputeTimes, ranks: RankTimes) -> ComputeTimes:
        """Return the rows with what their rank received as their length, if none is given.

        A rank to which a model routes more, such as tokens for its experts, has more to do.
        """
        if rows.tokens.any():
            return rows
        if not ranks.routed_bytes.any():
            # One step of even sizes among others would look like a step without work.
            return rows.where(np.full(rows.rank.size, not self._is_routed))
        self._is_routed = True
        received = np.ones(self._world, dtype=np.int64)  # 0 would be unknown
        received[ranks.rank] += ranks.routed_bytes
        return replace(rows, tokens=received[rows.rank])


def _with_unhooked(timing: StepTiming, world: int) -> ComputeTimes:
    """Return the marked compute rows, plus one per rank whose loop has no microbatch hooks."""
    rows, ranks = timing.compute, timing.ranks
    marked = is_marked(rows.microbatch, rows.chunk)
    if not marked.all():
        rows = rows.where(marked)
    hooked = np.bincount(rows.rank, minlength=world) > 0
    bare = ~hooked[ranks.rank] & (ranks.self_seconds > _LEAST_SHARE * ranks.step_seconds)
    count = int(bare.sum())
    if not count:
        return rows
    none, unknown = np.zeros(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    return ComputeTimes(
        rank=np.concatenate([rows.rank, ranks.rank[bare]]),
        op=np.concatenate([rows.op, none]),
        microbatch=np.concatenate([rows.microbatch, unknown]),
        chunk=np.concatenate([rows.chunk, unknown]),
        start_ns=np.concatenate([rows.start_ns, ranks.start_ns[bare]]),
        end_ns=np.concatenate([rows.end_ns, ranks.end_ns[bare]]),
        self_seconds=np.concatenate([rows.self_seconds, ranks.self_seconds[bare]]),
        tokens=np.concatenate([rows.tokens, none]),
        squared_tokens=np.concatenate([rows.squared_tokens, none]),
    )


def _typical(rank: Ints, values: Floats, world: int) -> Floats:
    """Return the trimmed mean of each rank's values: almost as robust as a median, less noisy."""
    counts = np.bincount(rank, minlength=world)
    samples = int(counts.max(initial=0))
    if samples and (counts == samples).all() and (rank[1:] >= rank[:-1]).all():
        cut = int(samples * TRIMMED)
        even: Floats = np.sort(values.reshape(world, samples), axis=1)[:, cut : samples - cut].mean(
            axis=1
        )
        return even
    order = np.argsort(values)
    narrow = rank[order].astype(np.uint16) if world <= 1 << 16 else rank[order]  # sorted by radix
    order = order[np.argsort(narrow, kind="stable")]
    sums = np.concatenate([[0.0], np.cumsum(values[order])])
    first = np.cumsum(counts) - counts
    trimmed = (counts * TRIMMED).astype(np.int64)
    kept = counts - 2 * trimmed
    inner = sums[first + trimmed + kept] - sums[first + trimmed]
    typical = np.full(world, np.nan)
    np.divide(inner, kept, out=typical, where=kept > 0)
    return typical
