"""Spans as numpy columns, the form in which the step model processes them.

One int64 table of `FIELDS` rows by n spans holds the spans of all ranks, so each operation runs
once for all. Times are CLOCK_REALTIME of the rank's node. Inside the table, which cannot hold None,
-1 is an unknown microbatch, chunk or peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_wire.batch import SpanBlock
from paceline_wire.spans import COMMUNICATION_OPS, NONE_16, NONE_32, WORDS

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

(
    RANK,
    INDEX,
    OP,
    GROUP,
    CHUNK,
    FLAGS,
    STEP,
    MICROBATCH,
    PEER,
    BYTES,
    SEQUENCE,
    START,
    DURATION,
) = range(13)
FIELDS = 13

# Larger clock values are invalid (CLOCK_REALTIME reaches it in the year 2116).
MAXIMUM_TIME_NS = 1 << 62
# No span lasts longer than a day; a longer duration means a torn or invalid record.
MAXIMUM_DURATION_NS = 86_400 * 1_000_000_000


class Spans:
    """A table of spans, of one rank or many."""

    __slots__ = ("table",)

    def __init__(self, table: Ints) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def row(self, field: int) -> Ints:
        values: Ints = self.table[field]
        return values

    @property
    def rank(self) -> Ints:
        return self.row(RANK)

    @property
    def op(self) -> Ints:
        return self.row(OP)

    @property
    def group(self) -> Ints:
        return self.row(GROUP)

    @property
    def flags(self) -> Ints:
        return self.row(FLAGS)

    @property
    def step(self) -> Ints:
        return self.row(STEP)

    @property
    def microbatch(self) -> Ints:
        return self.row(MICROBATCH)

    @property
    def peer(self) -> Ints:
        return self.row(PEER)

    @property
    def bytes(self) -> Ints:
        return self.row(BYTES)

    @property
    def sequence(self) -> Ints:
        return self.row(SEQUENCE)

    @property
    def start_ns(self) -> Ints:
        return self.row(START)

    @property
    def duration_ns(self) -> Ints:
        return self.row(DURATION)

    @property
    def end_ns(self) -> Ints:
        return self.row(START) + self.row(DURATION)

    def where(self, mask: Bools) -> Spans:
        return Spans(self.table[:, mask])

    def of_step(self) -> Spans:
        """Return the spans sorted by rank and ring index, without repetitions.

        Batches may overlap, repeat or be reordered.
        """
        spans = self
        if not _ascends(spans.rank):
            # Blocks are runs of one rank, which the stable sort only has to merge.
            spans = Spans(spans.table[:, np.argsort(spans.rank, kind="stable")])
        rank, index = spans.rank, spans.row(INDEX)
        if bool(((index[1:] > index[:-1]) | (rank[1:] > rank[:-1])).all()):
            return spans
        order = np.lexsort((index, rank))
        rank, index = rank[order], index[order]
        first = np.r_[True, (index[1:] != index[:-1]) | (rank[1:] != rank[:-1])]
        return Spans(spans.table[:, order[first]])


def _ascends(values: Ints) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def concatenate(parts: Sequence[Spans]) -> Spans:
    return parts[0] if len(parts) == 1 else Spans(np.hstack([part.table for part in parts]))


class Block(NamedTuple):
    """A rank's records as received, not decoded yet."""

    rank: int
    words: npt.NDArray[np.uint64]  # [WORDS, record]
    offset_ns: int  # added to their starts to get the server's CLOCK_REALTIME


def block(sent: SpanBlock, clock_shift_ns: int = 0) -> Block | None:
    """Return None if the block is empty. Raises ValueError for a fragment of a record."""
    offset_ns = sent.clock_offset_ns + clock_shift_ns
    if not sent.count or abs(offset_ns) >= MAXIMUM_TIME_NS:
        return None
    words = np.frombuffer(sent.columns, dtype="<u8").reshape(WORDS, sent.count)
    return Block(sent.rank, words, offset_ns)


def decode(blocks: Sequence[Block]) -> Spans:
    """Return the valid spans of all blocks, without records that have impossible times."""
    if not blocks:
        return Spans(np.empty((FIELDS, 0), dtype=np.int64))
    counts = [block.words.shape[1] for block in blocks]
    words = np.hstack([block.words for block in blocks])
    rank = np.repeat([block.rank for block in blocks], counts)
    offset_ns = np.repeat([block.offset_ns for block in blocks], counts)
    good = (words[6] < MAXIMUM_TIME_NS) & (words[7] <= MAXIMUM_DURATION_NS)
    good &= (words[0] < MAXIMUM_TIME_NS) & (words[5] < MAXIMUM_TIME_NS)
    good &= words[4] < MAXIMUM_TIME_NS
    if not good.all():
        words, rank, offset_ns = words[:, good], rank[good], offset_ns[good]
    return _fields(words.view(np.int64), rank, offset_ns)


def _fields(words: Ints, rank: Ints, offset_ns: Ints) -> Spans:
    low, high = np.int64(0xFFFF), np.int64(0xFFFF_FFFF)
    table = np.empty((FIELDS, words.shape[1]), dtype=np.int64)
    table[RANK] = rank
    table[INDEX] = words[0]
    table[OP] = words[1] & low
    table[GROUP] = words[1] >> 16 & low
    table[CHUNK] = words[1] >> 32 & low
    table[FLAGS] = words[1] >> 48 & low
    table[STEP] = words[2] & high
    table[MICROBATCH] = words[2] >> 32 & high
    table[PEER] = words[3] & high
    table[BYTES] = words[4]
    table[SEQUENCE] = words[5]
    table[START] = words[6] + offset_ns
    table[DURATION] = words[7]
    for row, unknown in ((CHUNK, NONE_16), (MICROBATCH, NONE_32), (PEER, NONE_32)):
        table[row][table[row] == unknown] = -1
    return Spans(table)


_OPS = 1 << 16


def one_of(ops: Ints, members: frozenset[int]) -> Bools:
    """Return which of `ops` are members, by a table lookup (`np.isin` costs ten times as much)."""
    return _lookup(members)[ops]


_lookups: dict[frozenset[int], Bools] = {}


def _lookup(members: frozenset[int]) -> Bools:
    table = _lookups.get(members)
    if table is None:
        table = np.zeros(_OPS, dtype=np.bool_)
        table[[int(member) for member in members]] = True
        _lookups[members] = table
    return table


COMMUNICATION = frozenset(int(op) for op in COMMUNICATION_OPS)
