"""The newest records of each rank, stored undecoded and only read when the job hangs.

They provide the program of a step (the order of communications on a rank) and the usual duration of
an operation. Memory is bounded for the whole job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from paceline_wire.batch import SpanBlock
from paceline_wire.spans import RECORD_BYTES, Span, from_columns, unpack

TOTAL_BYTES = 64 << 20
BYTES_PER_RANK = 256 << 10  # 4,096 records: several steps of a busy rank


class RecentRecords:
    """The newest records of every rank of one generation."""

    def __init__(self, world_size: int) -> None:
        self._limit = min(BYTES_PER_RANK, TOTAL_BYTES // max(world_size, 1))
        self._blocks: dict[int, deque[bytes]] = {}
        self._sizes: dict[int, int] = {}

    def add(self, block: SpanBlock) -> None:
        size = len(block.columns)
        if not size or size % RECORD_BYTES:
            return
        blocks = self._blocks.setdefault(block.rank, deque())
        total = self._sizes.get(block.rank, 0) + size
        blocks.append(block.columns)
        while total > self._limit and len(blocks) > 1:
            total -= len(blocks.popleft())
        self._sizes[block.rank] = total

    def of(self, rank: int) -> list[Span]:
        """Return the records of a rank in ring order, without duplicates."""
        by_index = {span.index: span for span in self._decoded(rank)}
        return [by_index[index] for index in sorted(by_index)]

    def _decoded(self, rank: int) -> Iterator[Span]:
        for columns in self._blocks.get(rank, ()):
            yield from unpack(from_columns(columns))


def p99_seconds(spans: Iterable[Span], op: int) -> float | None:
    """Return the p99 duration of one operation; None if it was not recorded."""
    durations = sorted(span.duration_ns for span in spans if span.op == op)
    if not durations:
        return None
    return durations[min(len(durations) - 1, int(0.99 * len(durations)))] / 1e9
