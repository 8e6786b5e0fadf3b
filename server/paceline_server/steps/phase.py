"""The pipeline phase of one recorded step: when each action of each data-parallel replica ran.

Tensor-parallel peers do the same at the same time, so one of them represents all. A phase spans
nodes, whose clocks differ by milliseconds: each stage is shifted to its neighbor's clock, based on
the fact that no action can start before its input has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.medians import median
from paceline_server.steps.grid import RankGrid, grid_of
from paceline_server.steps.pipeline import Pipeline, PipelineAction, part_of
from paceline_server.steps.timing import StepTiming
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Larger pipelines take too long to process within a step.
MAXIMUM_ACTIONS = 1 << 16
# With more replicas every n-th one is used, which is enough to characterize a stage.
MAXIMUM_REPLICAS = 256
# If both directions between two stages agree on the clocks to this share of the phase, the middle
# is used.
_CLOCK_AGREEMENT = 0.02


@dataclass(frozen=True, slots=True)
class PipelinePhase:
    """The pipeline phase of one step.

    Arrays are [action, replica] unless noted otherwise, in seconds since the replica's phase
    began.
    """

    pipeline: Pipeline
    ranks: Ints  # [stage, replica]: the representing rank
    starts: Floats
    ends: Floats
    receiving: Floats  # when the receive of the input from another stage began; NaN: unknown
    arrived: Floats  # when that receive ended; NaN: unknown
    data_ready: Floats  # [stage, replica]: when its data was ready, if known
    data_seconds: Floats  # [stage, replica]: wait for data within the phase

    @property
    def seconds(self) -> Floats:
        """Duration of each action. [action, replica]"""
        return self.ends - self.starts

    @property
    def total_seconds(self) -> Floats:
        """Duration of the phase. [replica]"""
        total: Floats = self.ends.max(axis=0)
        return total


class PipelinePhaseReader:
    """Reads the phase of a step; caches the layout, which rarely changes between steps."""

    def __init__(self, topology: Topology) -> None:
        self._grid = grid_of(topology)
        self._layout: tuple[list[Ints], Pipeline | None] = ([], None)

    def read(self, timing: StepTiming) -> PipelinePhase | None:
        """Return the phase; None without a pipeline, or if too many spans were lost."""
        stages = self._recorded(timing)
        if stages is None:
            return None
        keys, starts, ends, replicas = _in_all_stages(stages)
        pipeline = self._pipeline(keys, _is_v(keys, starts)) if replicas[0].size else None
        if pipeline is None:
            return None
        base = np.min([start[:, 0] for start in starts], axis=0)
        begun = np.concatenate([(start - base[:, None]).T for start in starts]) / 1e9
        ended = np.concatenate([(end - base[:, None]).T for end in ends]) / 1e9
        shift = _clock_shifts(pipeline, begun, ended)  # [stage, replica]
        begun, ended = begun - shift[pipeline.stage], ended - shift[pipeline.stage]
        zero = begun.min(axis=0)
        grid = self._grid
        who = grid.ranks[np.arange(grid.stages)[:, None], np.stack(replicas), 0]
        receiving, arrived = _receives(timing, grid, pipeline, who, base)
        behind = shift[pipeline.stage] + zero
        ready, within = _data(timing, who, base, begun[pipeline.first] + shift)
        return PipelinePhase(
            pipeline=pipeline,
            ranks=who,
            starts=begun - zero,
            ends=ended - zero,
            receiving=receiving - behind,
            arrived=arrived - behind,
            data_ready=ready - shift - zero,
            data_seconds=within,
        )

    def _recorded(self, timing: StepTiming) -> list[tuple[Ints, Ints, Ints, Ints]] | None:
        """Return by stage (actions, starts, ends, replicas) of the replicas with equal actions.

        Starts and ends are [replica, action].
        """
        grid = self._grid
        compute = timing.compute
        if grid.stages < 2 or not compute.rank.size:
            return None
        chosen = compute.microbatch >= 0
        if grid.shards > 1:
            chosen &= grid.shard[compute.rank] == 0
        if not chosen.any() or chosen.sum() > MAXIMUM_ACTIONS * grid.replicas:
            return None
        rank, start = compute.rank[chosen], compute.start_ns[chosen]
        end, key = compute.end_ns[chosen], _keys(timing, chosen)
        if (np.diff(rank) < 0).any() or ((np.diff(start) < 0) & (np.diff(rank) == 0)).any():
            order = np.lexsort((start, rank))
            rank, start, end, key = rank[order], start[order], end[order], key[order]
        present, begins, counts = np.unique(rank, return_index=True, return_counts=True)
        stage, replica_of = grid.stage[present], grid.replica[present]
        if np.unique(stage).size < grid.stages:
            return None
        found = []
        for number in range(grid.stages):
            members = np.flatnonzero(stage == number)
            members = members[np.argsort(replica_of[members])]
            usual = int(np.bincount(counts[members]).argmax())
            members = members[counts[members] == usual]
            rows = begins[members][:, None] + np.arange(usual)
            keys = key[rows]
            alike = (keys == keys[keys.shape[0] // 2]).all(axis=1)
            rows, replica = rows[alike], replica_of[members][alike]
            found.append((key[rows[0]], start[rows], end[rows], replica))
        return found

    def _pipeline(self, keys: list[Ints], is_v: bool) -> Pipeline | None:
        known, pipeline = self._layout
        is_same = pipeline is None or pipeline.is_v == is_v
        if is_same and len(known) == len(keys) and all(map(np.array_equal, known, keys)):
            return pipeline
        try:
            actions = [[_action(key) for key in stage.tolist()] for stage in keys]
            pipeline = Pipeline(actions, is_v=is_v)
        except ValueError:  # spans were lost
            pipeline = None
        self._layout = keys, pipeline
        return pipeline


def _is_v(keys: list[Ints], starts: list[Ints]) -> bool:
    """Return whether the second chunks of the stages go back, as in zero-bubble V schedules.

    Each microbatch then reaches the second chunk of the last stage before that of the first.
    """
    second = [np.flatnonzero(key >> 40 == int(Op.FORWARD) << 16 | 1) for key in (keys[0], keys[-1])]
    if not second[0].size or second[0].size != second[1].size:
        return False
    first, last = (
        np.median(start[:, rows], axis=1)
        for rows, start in zip(second, (starts[0], starts[-1]), strict=True)
    )
    return bool(median(last - first) < 0)


def _keys(timing: StepTiming, chosen: npt.NDArray[np.bool_]) -> Ints:
    compute = timing.compute
    chunk = np.maximum(compute.chunk[chosen], 0)  # unknown, because there is only one chunk
    key: Ints = compute.op[chosen] << 56 | chunk << 40 | compute.microbatch[chosen]
    return key


def _action(key: int) -> PipelineAction:
    return PipelineAction(key >> 56, key & (1 << 40) - 1, key >> 40 & 0xFFFF)


def _in_all_stages(
    stages: list[tuple[Ints, Ints, Ints, Ints]],
) -> tuple[list[Ints], list[Ints], list[Ints], list[Ints]]:
    """Return only the replicas that were recorded on every stage, in the same order."""
    whole = stages[0][3]
    for _, _, _, replica in stages[1:]:
        whole = np.intersect1d(whole, replica)
    whole = whole[:: -(-whole.size // MAXIMUM_REPLICAS) or 1]
    keys, starts, ends, replicas = [], [], [], []
    for key, start, end, replica in stages:
        kept = np.isin(replica, whole)
        keys.append(key)
        starts.append(start[kept])
        ends.append(end[kept])
        replicas.append(replica[kept])
    return keys, starts, ends, replicas


def _clock_shifts(pipeline: Pipeline, begun: Floats, ended: Floats) -> Floats:
    """Return how far each stage's clock is ahead of the first stage's, in seconds. [stage, replica]

    A result arrives after it was computed, in both directions: that bounds the difference from both
    sides. If the bounds are close (a stage that waited for its neighbor saw the latency itself),
    the middle is used, as in NTP; else the smallest possible difference.
    """
    shifts = np.zeros((pipeline.stages, begun.shape[1]))
    agreement = _CLOCK_AGREEMENT * (ended.max(axis=0) - begun.min(axis=0))
    for stage in range(1, pipeline.stages):
        highest = _least_gap(pipeline, begun, ended, stage - 1, stage)
        lowest = -_least_gap(pipeline, begun, ended, stage, stage - 1)
        middle = (lowest + highest) / 2
        least = np.clip(0.0, np.minimum(lowest, middle), np.maximum(highest, middle))
        step = np.where(np.abs(highest - lowest) <= agreement, middle, least)
        shifts[stage] = shifts[stage - 1] + np.where(np.isfinite(step), step, 0.0)
    return shifts


def _least_gap(pipeline: Pipeline, begun: Floats, ended: Floats, source: int, sink: int) -> Floats:
    """Return the shortest time from a result of `source` to its use in `sink`. [replica]"""
    has_source = pipeline.needs < pipeline.nodes
    users = np.flatnonzero(has_source & (pipeline.stage == sink))
    users = users[pipeline.stage[pipeline.needs[users]] == source]
    if not users.size:
        return np.full(begun.shape[1], np.inf)
    gap: Floats = (begun[users] - ended[pipeline.needs[users]]).min(axis=0)
    return gap


def _receives(
    timing: StepTiming, grid: RankGrid, pipeline: Pipeline, ranks: Ints, base_ns: Ints
) -> Floats:
    """Return start and end of the receive that each action needed. [start or end, action, replica]

    NaN: unknown.
    """
    moments = np.full((2, pipeline.nodes, ranks.shape[1]), np.nan)
    sent = timing.transfers
    lane = np.full(grid.ranks.size, -1)
    lane[ranks] = np.arange(ranks.shape[1])
    forward, backward = sent.op == Op.FORWARD_SEND, sent.op == Op.BACKWARD_SEND
    rows = np.flatnonzero((forward | backward) & (sent.microbatch >= 0))
    rows = rows[lane[sent.destination[rows]] >= 0]
    if not rows.size:
        return moments
    stage = grid.stage[sent.source[rows]]
    chunk = np.maximum(sent.chunk[rows], 0)
    part = part_of(chunk, stage, pipeline.stages, is_v=pipeline.is_v)
    part += np.where(forward[rows], 1, -1)
    op = np.where(forward[rows], int(Op.FORWARD), int(Op.BACKWARD))
    wanted = _part_key(op, part, sent.microbatch[rows])
    having = _part_key(pipeline.op, pipeline.part, pipeline.microbatch)
    order = np.argsort(having)
    place = order[np.minimum(np.searchsorted(having[order], wanted), having.size - 1)]
    good = having[place] == wanted
    at = lane[sent.destination[rows]]
    both = np.stack([sent.receive_start_ns[rows], sent.end_ns[rows]])
    moments[:, place[good], at[good]] = ((both - base_ns[at]) / 1e9)[:, good]
    return moments


def _part_key(op: Ints, part: Ints, microbatch: Ints) -> Ints:
    key: Ints = op << 56 | part << 40 | microbatch
    return key


def _data(
    timing: StepTiming, ranks: Ints, base_ns: Ints, first_starts: Floats
) -> tuple[Floats, Floats]:
    """Return when each stage's data was ready, and its later waits for data. [stage, replica]"""
    known = timing.ranks
    ready, within = np.full(ranks.shape, -np.inf), np.zeros(ranks.shape)
    if not known.rank.size:
        return ready, within
    place = np.minimum(np.searchsorted(known.rank, ranks), known.rank.size - 1)
    found = known.rank[place] == ranks
    began = (known.start_ns[place] - base_ns) / 1e9
    waited = known.data_wait_seconds[place]
    ready[found] = (began + waited)[found]
    within[found] = np.maximum(waited - (first_starts - began), 0.0)[found]
    return ready, within
