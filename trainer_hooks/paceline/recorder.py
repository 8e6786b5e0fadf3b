"""The writer's end of a ring: records, the stack of operations in flight, step boundaries.

One thread owns the ring (the one that called `init`); it alone writes records and frames, so no
lock is needed. What other threads and the garbage collector measure is queued in a bounded deque
(an append is atomic under the interpreter's lock) and written at the owner's next step boundary.
"""

from __future__ import annotations

import gc
import math
import struct
from _thread import get_ident
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, SupportsFloat

from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    PAGE,
    STATE_DEPTH,
    STATE_EVALUATION_LOSS,
    STATE_EVALUATION_STEP,
    STATE_FRAMES,
    STATE_GRADIENT_NORM,
    STATE_HEAD,
    STATE_LOSS,
    STATE_LOSS_STEP,
    STATE_MICROBATCH,
    STATE_STATUS,
    STATE_STEP,
    STATE_STEP_STARTED_NS,
    Definition,
    RingFile,
    Status,
    define,
)
from paceline_wire.spans import NONE_16, NONE_32, RECORD_BYTES, WORDS, Op

if TYPE_CHECKING:
    from paceline.device import DeviceTimer
    from paceline.sections import Transfer

NO_CHUNK = NONE_16  # upper half of word 1: chunk, and no flags
NO_MICROBATCH = NONE_32 << 32  # in word 2
NO_PLACE = NONE_32  # a frame's `group << 32 | peer`: no group, no peer
SHORTEST_GC_PAUSE_NS = 100_000  # young collections take microseconds, several per millisecond
QUEUE_LENGTH = 4096

pack_record = struct.Struct(f"<{WORDS}Q").pack_into
# A section's record: op, upper half of word 1, and words 3 to 5 (no peer, bytes, sequence) copied.
pack_section = struct.Struct("<QIIQ24sQQ").pack_into
NO_TRANSFER = NONE_32.to_bytes(8, "little") + bytes(16)
RECORD_SHIFT = RECORD_BYTES.bit_length() - 1

Row = tuple[int, int, int, int, int, int, int]  # words 1..7 of a record


class Recorder:
    """Writes what the owner thread does into its ring.

    `word2` holds the step and microbatch of what is going on, as a record wants them, and `chunk`
    the upper half of word 1; sections copy both. `head` and `depth` are kept here as well as on
    the state page, which is slower to read.
    """

    __slots__ = (
        "_gc_started_ns",
        "action",
        "calling",
        "chunk",
        "depth",
        "failures",
        "head",
        "lost",
        "mask",
        "outer",
        "owner",
        "queue",
        "ring",
        "spans",
        "state",
        "status",
        "step",
        "timer",
        "word2",
    )

    def __init__(self, ring: RingFile) -> None:
        self.ring = ring
        self.state = ring.state
        self.spans = ring.spans
        self.mask = ring.capacity - 1
        self.head = 0
        self.depth = 0
        self.owner = get_ident()
        self.chunk = NO_CHUNK
        self.word2 = NO_MICROBATCH
        self.action: Transfer | None = None  # the transfer action we are in
        self.calling = False  # the owner's thread is inside a timed torch.distributed function
        self.outer: list[tuple[int, int, Transfer | None]] = []  # word2, chunk, action around it
        self.timer: DeviceTimer | None = None
        self.step = 0
        self.status = Status.STARTING
        self.queue: deque[Row] = deque(maxlen=QUEUE_LENGTH)
        self.lost = 0  # rows of other threads that found the queue full
        self.failures = 0  # exceptions of our own that were kept from the training
        self._gc_started_ns = 0
        self.state[STATE_STATUS] = Status.STARTING
        for offset in range(0, len(self.spans), PAGE):
            self.spans[offset] = 0  # touch each page now: a page fault is dearer than a record
        for depth in range(FRAMES):
            self.state[STATE_FRAMES + depth * FRAME_WORDS + 2] = NO_PLACE

    # Records

    def write(
        self, word1: int, word2: int, peer: int, size: int, sequence: int, start: int, length: int
    ) -> None:
        """Append one record; owner thread only. Words as `paceline_wire.spans` lays them out."""
        head = self.head
        offset = (head & self.mask) << RECORD_SHIFT
        pack_record(self.spans, offset, head, word1, word2, peer, size, sequence, start, length)
        self.state[STATE_HEAD] = self.head = head + 1

    def write_simple(self, op: int, start_ns: int, end_ns: int) -> None:
        """A record of the current step that belongs to no microbatch, chunk or peer."""
        step = self.step | NO_MICROBATCH
        self.write(op | NO_CHUNK << 32, step, NONE_32, 0, 0, start_ns, end_ns - start_ns)

    def enqueue(self, row: Row) -> None:
        """Any thread: have a record written at the next step boundary."""
        if len(self.queue) >= QUEUE_LENGTH:
            self.lost += 1
        self.queue.append(row)

    def drain(self) -> None:
        queue = self.queue
        while queue:
            try:
                self.write(*queue.popleft())
            except (ValueError, struct.error):  # a field that fits no record
                self.failures += 1

    def define(self, definition: Definition) -> bool:
        return define(self.ring, definition)

    # Operations in flight

    def push(self, op: int, start_ns: int, place: int, sequence: int) -> int:
        """Put a frame on the state page. Returns the depth to give to `pop`."""
        state = self.state
        depth = self.depth
        if depth < FRAMES:
            base = STATE_FRAMES + depth * FRAME_WORDS
            state[base] = op
            state[base + 1] = start_ns
            state[base + 2] = place
            state[base + 3] = sequence
        state[STATE_DEPTH] = self.depth = depth + 1
        return depth

    def pop(self, depth: int) -> None:
        """Sections rely on a free frame having no place and no sequence."""
        state = self.state
        state[STATE_DEPTH] = self.depth = depth
        self.clear_place()

    def clear_place(self) -> None:
        """Leave no place and no sequence in the free frame above the open ones."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self.state[base + 2] = NO_PLACE
            self.state[base + 3] = 0

    # Steps

    def begin_step(self, step: int, now: int) -> None:
        state = self.state
        self.step = step
        self.word2 = step | NO_MICROBATCH
        self.chunk = NO_CHUNK
        self.action = None
        self.outer.clear()
        state[STATE_STEP] = step
        state[STATE_STEP_STARTED_NS] = now
        state[STATE_MICROBATCH] = 0
        self.clear_frames()
        self.push(Op.STEP, now, NO_PLACE, 0)
        self.set_status(Status.RUNNING)

    def end_step(self, started_ns: int, now: int) -> None:
        self.write_simple(Op.STEP, started_ns, now)
        self.drain()

    def clear_frames(self) -> None:
        """Whatever an exception or an early exit left behind."""
        for depth in range(min(self.depth, FRAMES)):
            self.pop(depth)
        self.state[STATE_DEPTH] = self.depth = 0

    def leave_loop(self) -> None:
        self.clear_frames()
        self.drain()

    def set_status(self, status: int) -> None:
        if status != self.status:
            self.status = status
            self.state[STATE_STATUS] = status

    def report(
        self,
        step: int,
        loss: SupportsFloat | None,
        gradient_norm: SupportsFloat | None,
        evaluation_loss: SupportsFloat | None,
    ) -> None:
        state, floats = self.state, self.ring.state_floats
        if loss is not None:
            floats[STATE_LOSS] = float(loss)
            norm = math.nan if gradient_norm is None else float(gradient_norm)
            if gradient_norm is not None and math.isnan(norm):
                norm = math.inf  # NaN says "not given" on the page
            floats[STATE_GRADIENT_NORM] = norm
            state[STATE_LOSS_STEP] = step + 1
        if evaluation_loss is not None:
            floats[STATE_EVALUATION_LOSS] = float(evaluation_loss)
            state[STATE_EVALUATION_STEP] = step + 1

    # Garbage collection

    def on_gc(self, phase: str, information: dict[str, int]) -> None:
        """A `gc.callbacks` entry. May run in any thread, between any two lines of the owner."""
        if phase == "start":
            self._gc_started_ns = perf_counter_ns()
            return
        pause = perf_counter_ns() - self._gc_started_ns
        if self._gc_started_ns and pause >= SHORTEST_GC_PAUSE_NS:
            word1 = Op.GC | NO_CHUNK << 32
            self.enqueue((word1, self.word2, NONE_32, 0, 0, self._gc_started_ns, pause))

    def watch_gc(self) -> None:
        gc.callbacks.append(self.on_gc)

    def unwatch_gc(self) -> None:
        if self.on_gc in gc.callbacks:
            gc.callbacks.remove(self.on_gc)

    # Fork

    def detach(self) -> None:
        """In a forked child: write to private memory from now on; the ring is the parent's."""
        self.unwatch_gc()
        self.state = memoryview(bytearray(len(self.state) * 8)).cast("Q")
        self.spans = memoryview(bytearray(RECORD_BYTES))
        self.mask = 0
        self.queue.clear()
