"""What the owner thread records: the writer of the ring, and what other threads add to it.

What other threads and the garbage collector measure is queued in a bounded deque (an append is
atomic under the interpreter's lock) and written at the owner's next step boundary.
"""

from __future__ import annotations

import gc
import struct
from collections import deque
from time import perf_counter_ns

from paceline.writer import Writer
from paceline.writer.pure import NO_CHUNK, NO_PLACE
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    PAGE,
    STATE_FRAMES,
    STATE_STATUS,
    Definition,
    RingFile,
    Status,
    define,
)
from paceline_wire.spans import NONE_32, RECORD_BYTES, Op

SHORTEST_GC_PAUSE_NS = 100_000  # young collections take microseconds, several per millisecond
QUEUE_LENGTH = 4096

Row = tuple[int, int, int, int, int, int, int]  # words 1..7 of a record


class Recorder(Writer):
    """Writes what the owner thread does into its ring."""

    __slots__ = (
        "_gc_started_ns",
        "lost",
        "queue",
        "ring",
        "state",
        "status",
    )

    def __init__(self, ring: RingFile) -> None:
        super().__init__(ring.state, ring.spans)
        self.ring = ring
        self.state = ring.state
        self.status = Status.STARTING
        self.queue: deque[Row] = deque(maxlen=QUEUE_LENGTH)
        self.lost = 0  # rows of other threads that found the queue full
        self._gc_started_ns = 0
        self.state[STATE_STATUS] = Status.STARTING
        for offset in range(0, len(ring.spans), PAGE):
            ring.spans[offset] = 0  # touch each page now: a page fault is dearer than a record
        for depth in range(FRAMES):
            self.state[STATE_FRAMES + depth * FRAME_WORDS + 2] = NO_PLACE

    # Records

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
            except (ValueError, OverflowError, struct.error):  # a field that fits no record
                self.failures += 1

    def define(self, definition: Definition) -> bool:
        return define(self.ring, definition)

    # Steps

    def leave_loop(self) -> None:
        self.clear_frames()
        self.drain()

    def set_status(self, status: int) -> None:
        if status != self.status:
            self.status = status
            self.state[STATE_STATUS] = status

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
        self.rebind(self.state, memoryview(bytearray(RECORD_BYTES)))
        self.queue.clear()
