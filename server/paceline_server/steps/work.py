"""Counts and values that ranks report beside durations: samples, tokens, memory, FLOPs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline_server.steps.columns import Ints, Spans
from paceline_server.steps.grid import RankGrid
from paceline_wire.spans import MemoryKind, Op

_LARGEST = 1 << 40  # samples or tokens of a rank in one step; more is malformed


class RankValues:
    """The newest MEMORY and FLOPS records of each rank. They belong to no step."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.memory: dict[int, dict[int, int]] = {}  # by rank, then by `MemoryKind`
        self.flops: dict[int, int] = {}  # by rank

    def extract(self, spans: Spans) -> Spans:
        """Keep the values; return the other spans."""
        valued = (spans.op == Op.MEMORY) | (spans.op == Op.FLOPS)
        if not valued.any():
            return spans
        rows = spans.where(valued)
        columns = rows.rank, rows.op, rows.sequence, rows.bytes
        for rank, op, kind, value in zip(*(column.tolist() for column in columns), strict=True):
            if not 0 <= rank < self._world_size:
                continue
            if op == Op.FLOPS:
                self.flops[rank] = value
            elif kind in _KINDS:
                self.memory.setdefault(rank, {})[kind] = value
        return spans.where(~valued)

    def fullest(self) -> tuple[int, Mapping[int, int]] | None:
        """Return the rank with the highest peak, or with the most parameters, and its memory."""
        return max(self.memory.items(), key=lambda item: _fullness(item[1]), default=None)


_KINDS = frozenset(int(kind) for kind in MemoryKind)


def _fullness(memory: Mapping[int, int]) -> tuple[int, int]:
    return memory.get(MemoryKind.PEAK, 0), memory.get(MemoryKind.PARAMETERS, 0)


def count_work(spans: Spans, grid: RankGrid) -> tuple[int | None, int | None]:
    """Return the samples and tokens of a step of the job; None: not known.

    The ranks of a replica share its data, so one of them counts: the one that saw most, as the
    middle stages of a pipeline may see none. Every replica must have counted.
    """
    steps = np.flatnonzero(spans.op == Op.STEP)
    samples, tokens = (
        _over_replicas(spans.rank[steps], column[steps], grid)
        for column in (spans.sequence, spans.bytes)
    )
    return samples, tokens


def _over_replicas(rank: Ints, counted: Ints, grid: RankGrid) -> int | None:
    if not counted.any():
        return None
    most = np.zeros(grid.replicas, dtype=np.int64)
    np.maximum.at(most, grid.replica[rank], np.minimum(counted, _LARGEST))
    return int(most.sum()) if most.all() else None
