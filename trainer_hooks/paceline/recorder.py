"""The recorder: the ring's writer, plus records of other threads and of the garbage collector.

Other threads must not write to the ring. They append to a bounded deque (an append is atomic under
the interpreter's lock), which the owner thread drains at its next step boundary.
"""

from __future__ import annotations

import gc
import struct
from collections import deque
from time import perf_counter_ns

from paceline.writer import Writer
from paceline.writer.interface import NO_CHUNK, NO_PLACE, Row
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    PAGE,
    SAVE_FAILURE_BYTES,
    STATE_ABILITIES,
    STATE_FAILED_SAVES,
    STATE_FRAMES,
    STATE_MICROBATCH,
    STATE_SAVE_FAILURE,
    STATE_SAVED_STEP,
    STATE_STATUS,
    Ability,
    Definition,
    RankDescription,
    RingFile,
    Status,
    define,
    describe,
)
from paceline_wire.spans import NONE_32, RECORD_BYTES, Op

SHORTEST_GC_PAUSE_NS = 100_000  # young collections take microseconds, several per millisecond
QUEUE_LENGTH = 4096


class Recorder(Writer):
    """The writer of one rank's ring, with a queue for its other threads."""

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
        self.lost = 0  # records of other threads that were dropped because the queue was full
        self._gc_started_ns = 0
        self.state[STATE_STATUS] = Status.STARTING
        for offset in range(0, len(ring.spans), PAGE):
            # touch each page now, because a page fault costs more than a record
            ring.spans[offset] = 0
        for depth in range(FRAMES):
            self.state[STATE_FRAMES + depth * FRAME_WORDS + 2] = NO_PLACE

    # Records

    def enqueue(self, row: Row) -> None:
        """Queue a record for the next step boundary. Any thread may call it."""
        if len(self.queue) >= QUEUE_LENGTH:
            self.lost += 1
        self.queue.append(row)

    def drain(self) -> None:
        """Write the queued records (owner thread only)."""
        queue = self.queue
        while queue:
            try:
                self.write(*queue.popleft())
            except (ValueError, OverflowError, struct.error):  # a value does not fit its field
                self.failures += 1

    def define(self, definition: Definition) -> bool:
        """Append a definition to the ring. Return False if its area is full."""
        return define(self.ring, definition)

    def describe(self, description: RankDescription) -> bool:
        """Append a description to the ring. Return False if its area is full."""
        return describe(self.ring, description)

    # Steps

    def set_status(self, status: int) -> None:
        """Show a `Status` on the state page."""
        if status != self.status:
            self.status = status
            self.state[STATE_STATUS] = status

    def show_progress(self) -> None:
        """Change the state page although nothing is recorded, as in each batch of an evaluation.

        The batches count as microbatches until the next step begins.
        """
        self.state[STATE_MICROBATCH] = (self.state[STATE_MICROBATCH] + 1) & NONE_32

    # Checkpoints. Any single thread may report them, because nothing else writes these words.

    def declare(self, checkpoint: bool, stop: bool) -> None:
        """Publish which commands the script executes."""
        self.state[STATE_ABILITIES] = Ability.CHECKPOINT * bool(checkpoint) | Ability.STOP * bool(
            stop
        )

    def checkpoint_saved(self, step: int) -> None:
        """Publish that the checkpoint after `step` completed steps is committed.

        A step of 0 withdraws it: no checkpoint is left.
        """
        self.state[STATE_SAVED_STEP] = int(step) + 1

    def checkpoint_failed(self, reason: str) -> None:
        """Count a failed checkpoint and publish its reason."""
        text = str(reason).encode(errors="replace")[:SAVE_FAILURE_BYTES]
        text = text.ljust(SAVE_FAILURE_BYTES, b"\0")
        words = memoryview(text).cast("Q")
        self.state[STATE_SAVE_FAILURE : STATE_SAVE_FAILURE + len(words)] = words
        self.state[STATE_FAILED_SAVES] += 1

    # Garbage collection

    def on_gc(self, phase: str, information: dict[str, int]) -> None:
        """Record a pause; an entry of `gc.callbacks`.

        It may run in any thread, between any two lines of the owner thread.
        """
        if phase == "start":
            self._gc_started_ns = perf_counter_ns()
            return
        pause = perf_counter_ns() - self._gc_started_ns
        if self._gc_started_ns and pause >= SHORTEST_GC_PAUSE_NS:
            word1 = Op.GC | NO_CHUNK << 32
            self.enqueue((word1, self.word2, NONE_32, 0, 0, self._gc_started_ns, pause))

    def watch_gc(self) -> None:
        """Start recording garbage collections."""
        gc.callbacks.append(self.on_gc)

    def unwatch_gc(self) -> None:
        """Stop recording garbage collections."""
        if self.on_gc in gc.callbacks:
            gc.callbacks.remove(self.on_gc)

    # Fork

    def detach(self) -> None:
        """Redirect writes to private memory, because in a forked child the ring is the parent's."""
        self.unwatch_gc()
        self.state = memoryview(bytearray(len(self.state) * 8)).cast("Q")
        self.rebind(self.state, memoryview(bytearray(RECORD_BYTES)))
        self.queue.clear()
