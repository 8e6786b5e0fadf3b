"""Spans: fixed-size records of what a rank did and how long it took.

A record is eight 64-bit little-endian words, so that a plain strided slice of a block of records
yields a column (no numpy in the trainer or the agent):

    word 0   index       position in the ring since its creation, from 0
    word 1   op u16 | group u16 | chunk u16 | flags u16
    word 2   step u32 | microbatch u32
    word 3   peer u32 | reserved u32
    word 4   bytes       payload of a communication; tokens of a forward, a backward or a step;
                         the value of MEMORY and FLOPS; 0 otherwise or unknown
    word 5   sequence    of the collective in its group, or of the transfer to/from its peer, from
                         1; samples of a step; a `MemoryKind`
    word 6   start_ns    CLOCK_MONOTONIC of the node (time.perf_counter_ns)
    word 7   duration_ns
"""

from __future__ import annotations

import enum
import struct
import sys
from array import array
from collections.abc import Iterator

import msgspec

WORDS = 8
RECORD_BYTES = WORDS * 8
RECORD = struct.Struct("<QHHHHIIIIQQQQ")
NONE_16 = 0xFFFF  # chunk unknown
NONE_32 = 0xFFFF_FFFF  # microbatch or peer unknown

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("paceline needs a little-endian machine")


class Op(enum.IntEnum):
    """The kind of work that a span measured. Ids are part of the format: never reuse one."""

    FORWARD = 1
    BACKWARD = 2
    BACKWARD_WEIGHT = 3
    FORWARD_SEND = 4
    FORWARD_RECV = 5
    BACKWARD_SEND = 6
    BACKWARD_RECV = 7

    ALL_REDUCE = 16
    ALL_GATHER = 17
    REDUCE_SCATTER = 18
    BROADCAST = 19
    BARRIER = 20
    ALL_TO_ALL = 21
    REDUCE = 22
    GATHER = 23
    SCATTER = 24
    SEND = 25  # a transfer outside any pipeline action
    RECV = 26

    STEP = 32  # the whole optimizer step
    DATA_WAIT = 33  # the loop waited for its next batch
    OPTIMIZER = 34
    CHECKPOINT = 35  # time the loop was blocked by a checkpoint
    GC = 36
    EVALUATE = 37
    STARTUP = 38  # from process start to the first step

    MEMORY = 48  # a value without duration: bytes of memory of a `MemoryKind`
    FLOPS = 49  # a value without duration: floating-point operations of the rank in one step


class MemoryKind(enum.IntEnum):
    """The quantity that a MEMORY record measures. Ids are part of the format: never reuse one."""

    PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER = 3  # its state
    ALLOCATED = 4  # on the device, at the end of the step
    RESERVED = 5
    INACTIVE = 6  # free parts of blocks that are in use: fragmentation
    PEAK = 7  # most allocated
    AFTER_FORWARD = 8  # allocated at the end of the last forward of the step
    AFTER_BACKWARD = 9
    AFTER_OPTIMIZER = 10


SECTION_BASE = 1024  # a user's `section("name")` has op SECTION_BASE + its definition id

COMPUTE_OPS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT})
PIPELINE_TRANSFER_OPS = frozenset(
    {Op.FORWARD_SEND, Op.FORWARD_RECV, Op.BACKWARD_SEND, Op.BACKWARD_RECV}
)
TRANSFER_OPS = PIPELINE_TRANSFER_OPS | {Op.SEND, Op.RECV}
RECEIVE_OPS = frozenset({Op.FORWARD_RECV, Op.BACKWARD_RECV, Op.RECV})
COLLECTIVE_OPS = frozenset(
    {
        Op.ALL_REDUCE,
        Op.ALL_GATHER,
        Op.REDUCE_SCATTER,
        Op.BROADCAST,
        Op.BARRIER,
        Op.ALL_TO_ALL,
        Op.REDUCE,
        Op.GATHER,
        Op.SCATTER,
    }
)
COMMUNICATION_OPS = TRANSFER_OPS | COLLECTIVE_OPS


class Flag(enum.IntFlag):
    """How a communication span was measured.

    A blocking call writes one span with no flag. An async call writes an ASYNC span (launch to
    completion as seen by the host) and, if the host had to wait for it, a WAIT span with the same
    op, group and sequence: only the WAIT span took the host's time.
    Host calls of a thread other than the training's are ASYNC too: they do not block the training.
    """

    NONE = 0
    ASYNC = 1
    WAIT = 2
    DEVICE = 4  # start and duration come from device events, mapped to the host clock


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One record, decoded. Unknown is None. `op` is an `Op` or SECTION_BASE + definition id."""

    index: int
    op: int
    group: int  # definition id of the process group; 0: none or the default group
    chunk: int | None
    flags: int
    step: int
    microbatch: int | None
    peer: int | None  # global rank
    bytes: int
    sequence: int
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        """CLOCK_MONOTONIC at the end."""
        return self.start_ns + self.duration_ns


def op_name(op: int) -> str:
    """Return the name of an op.

    `forward_send` for Op.FORWARD_SEND, `section:3` for a user's section with definition 3.
    """
    if op >= SECTION_BASE:
        return f"section:{op - SECTION_BASE}"
    try:
        return Op(op).name.lower()
    except ValueError:
        return f"op:{op}"


def unpack(records: bytes | memoryview) -> Iterator[Span]:
    """Decode whole records in row order. Raises ValueError on a trailing fragment."""
    if len(records) % RECORD_BYTES:
        raise ValueError(f"records must be a multiple of {RECORD_BYTES} bytes, got {len(records)}")
    for row in RECORD.iter_unpack(records):
        index, op, group, chunk, flags, step, micro, peer, _, size, seq, start, duration = row
        yield Span(
            index,
            op,
            group,
            None if chunk == NONE_16 else chunk,
            flags,
            step,
            None if micro == NONE_32 else micro,
            None if peer == NONE_32 else peer,
            size,
            seq,
            start,
            duration,
        )


def to_columns(records: bytes) -> bytes:
    """Transpose row-major records to columns: word 0 of all records, word 1 of all, ..."""
    words = array("Q")
    words.frombytes(records)
    return b"".join(words[column::WORDS].tobytes() for column in range(WORDS))


def from_columns(columns: bytes) -> bytes:
    """Invert `to_columns`. Raises ValueError if the length is not a multiple of RECORD_BYTES."""
    if len(columns) % RECORD_BYTES:
        raise ValueError(f"columns must be a multiple of {RECORD_BYTES} bytes, got {len(columns)}")
    words = array("Q")
    words.frombytes(columns)
    count = len(words) // WORDS
    rows = array("Q", bytes(len(columns)))
    for column in range(WORDS):
        rows[column::WORDS] = words[column * count : (column + 1) * count]
    return rows.tobytes()
