"""The writer's end of a ring in Python: the reference for `_native.c`, and its fallback.

The thread that creates the `Writer` owns the ring. Only that thread writes records and frames, so
no lock is needed. A record is written before the head that publishes it, and a frame before the
depth.
"""

from __future__ import annotations

import math
import struct
import weakref
from _thread import get_ident
from time import perf_counter_ns
from typing import Any, SupportsFloat

from paceline.writer.interface import (
    NO_CHUNK,
    NO_MICROBATCH,
    NO_PLACE,
    EventTimer,
    TransferAction,
)
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    STATE_DEPTH,
    STATE_EVALUATION_LOSS,
    STATE_EVALUATION_STEP,
    STATE_FRAMES,
    STATE_GRADIENT_NORM,
    STATE_HEAD,
    STATE_LOSS,
    STATE_LOSS_STEP,
    STATE_MICROBATCH,
    STATE_STEP,
    STATE_STEP_STARTED_NS,
)
from paceline_wire.spans import NONE_32, RECORD_BYTES, WORDS, Op

_pack_record = struct.Struct(f"<{WORDS}Q").pack_into
_pack_float = struct.Struct("<d").pack
_float_bits = struct.Struct("<Q").unpack


class Writer:
    """The records of one rank and its stack of operations in flight.

    `word2` holds the current step and microbatch in the form of a record, `chunk` the upper half of
    word 1; sections copy both into their records.

    Args:
        state: the words of the state page.
        spans: memory for a power of two of records.
    """

    __slots__ = (
        *("_forward_started_ns", "_spans", "_state", "action", "chunk", "depth", "failures"),
        *("head", "mask", "owner"),
        *("sections", "step", "step_head", "step_started_ns", "timer", "transfer"),
        *("transfers_launched", "word2"),
    )

    def __init__(self, state: memoryview, spans: memoryview) -> None:
        self.head = 0
        self.depth = 0
        self.step = 0
        self.step_started_ns = 0
        self.step_head = 0  # `head` when the step's data wait ended
        self._forward_started_ns = 0  # 0: not in a forward pass
        self.chunk = NO_CHUNK
        self.word2 = NO_MICROBATCH
        self.owner = get_ident()
        self.timer: EventTimer | None = None
        self.action: TransferAction | None = None  # the innermost open transfer action
        self.transfer = 0  # `action` for the C code: its `word`, or 0
        self.transfers_launched = 0  # transfers launched inside actions
        self.sections: dict[object, Section] = {}  # sections of the owner thread, by name
        self.failures = 0  # exceptions of Paceline that did not reach the training script
        self.rebind(state, spans)

    def rebind(self, state: memoryview, spans: memoryview) -> None:
        """Redirect writes to this memory."""
        self._state = state
        self._spans = spans
        self.mask = len(spans) // RECORD_BYTES - 1

    def write(
        self, word1: int, word2: int, peer: int, size: int, sequence: int, start: int, length: int
    ) -> None:
        """Append one record (owner thread only); `paceline_wire.spans` describes the words."""
        head = self.head
        offset = (head & self.mask) * RECORD_BYTES
        _pack_record(self._spans, offset, head, word1, word2, peer, size, sequence, start, length)
        self._state[STATE_HEAD] = self.head = head + 1

    def write_simple(self, op: int, start_ns: int, end_ns: int) -> None:
        """Append a record of the current step without microbatch, chunk or peer."""
        step = self.step | NO_MICROBATCH
        self.write(op | NO_CHUNK << 32, step, NONE_32, 0, 0, start_ns, end_ns - start_ns)

    def push(self, op: int, start_ns: int, place: int, sequence: int) -> int:
        """Push a frame onto the state page. Return the depth to pass to `pop`."""
        depth = self.depth
        if depth < FRAMES:
            base = STATE_FRAMES + depth * FRAME_WORDS
            state = self._state
            state[base] = op
            state[base + 1] = start_ns
            state[base + 2] = place
            state[base + 3] = sequence
        self._state[STATE_DEPTH] = self.depth = depth + 1
        return depth

    def pop(self, depth: int) -> None:
        """Remove all frames from `depth` on."""
        self._state[STATE_DEPTH] = self.depth = depth
        self.clear_place()

    def clear_place(self) -> None:
        """Clear place and sequence of the first free frame, which sections expect to be clear."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self._state[base + 2] = NO_PLACE
            self._state[base + 3] = 0

    def clear_frames(self) -> None:
        """Remove all frames, also those that an exception or an early exit left open."""
        for depth in reversed(range(min(self.depth, FRAMES))):
            self.pop(depth)
        self._state[STATE_DEPTH] = self.depth = 0

    def begin_step(self, step: int) -> None:
        """Start a step, which begins with the wait for its data."""
        state = self._state
        self.step_started_ns = now = perf_counter_ns()
        self.step = step
        self.word2 = step | NO_MICROBATCH
        self.chunk = NO_CHUNK
        self.action = None
        state[STATE_STEP] = step
        state[STATE_STEP_STARTED_NS] = now
        state[STATE_MICROBATCH] = 0
        self.clear_frames()
        self.push(Op.STEP, now, NO_PLACE, 0)
        self.push(Op.DATA_WAIT, now, NO_PLACE, 0)

    def end_data_wait(self) -> None:
        """Record the wait for data; the rest of the step follows."""
        self.pop(1)
        self.write_simple(Op.DATA_WAIT, self.step_started_ns, perf_counter_ns())
        self.step_head = self.head

    def end_step(self) -> None:
        """Record the step that `begin_step` started."""
        self.write_simple(Op.STEP, self.step_started_ns, perf_counter_ns())

    def begin_forward(self) -> None:
        """Start a forward pass, or start it again."""
        self._forward_started_ns = perf_counter_ns()

    def end_forward(self) -> None:
        """Record the forward pass, if it began in this step."""
        started, self._forward_started_ns = self._forward_started_ns, 0
        if started >= self.step_started_ns > 0:
            self.write_simple(Op.FORWARD, started, perf_counter_ns())

    def drop_forward(self) -> None:
        """Forget the forward pass: there was none."""
        self._forward_started_ns = 0

    def report(
        self,
        step: int,
        loss: SupportsFloat | None,
        gradient_norm: SupportsFloat | None,
        evaluation_loss: SupportsFloat | None,
    ) -> None:
        """Show these values of `step` on the state page."""
        state = self._state
        loss_bits, evaluation_bits = _bits(loss), _bits(evaluation_loss)
        norm = math.nan if gradient_norm is None else _number(gradient_norm)
        if gradient_norm is not None and not math.isfinite(norm):
            norm = math.inf  # NaN on the page means "not given"
        if loss_bits is not None:
            state[STATE_LOSS] = loss_bits
            state[STATE_GRADIENT_NORM] = _bits(norm)
            state[STATE_LOSS_STEP] = step + 1
        if evaluation_bits is not None:
            state[STATE_EVALUATION_LOSS] = evaluation_bits
            state[STATE_EVALUATION_STEP] = step + 1

    def try_report(
        self,
        loss: SupportsFloat | None,
        gradient_norm: SupportsFloat | None,
        evaluation_loss: SupportsFloat | None,
    ) -> bool:
        """Show values of the current step on the state page; the fast path of `paceline.report`.

        Return False without an effect if called in another thread, if a device may still compute
        the values, or if a value is not a number.
        """
        if get_ident() != self.owner or self.timer is not None:
            return False
        try:
            self.report(self.step, loss, gradient_norm, evaluation_loss)
        except Exception:  # raised again in the caller's slow path, which counts and logs it
            return False
        return True

    def find_section(self, name: object) -> Section | None:
        """Return the section of this name; None in another thread or for an unknown name."""
        if get_ident() != self.owner:
            return None
        try:
            return self.sections.get(name)
        except TypeError:  # not hashable
            return None


def _bits(value: SupportsFloat | None) -> Any:
    """Return a float as a word of the state page; None for None."""
    return None if value is None else _float_bits(_pack_float(_number(value)))[0]


def _number(value: Any) -> float:
    """Return a float. `item()` first: `float()` of a tensor with a gradient emits a warning."""
    return float(value.item() if hasattr(value, "item") else value)


class Section:
    """A named part of the step. Belongs to the thread that owns the ring; may nest in itself."""

    __slots__ = ("_outer", "depth", "op", "recorder", "start")

    def __init__(self, recorder: Any, op: int) -> None:
        self.recorder = recorder  # a Writer; a subclass may need a `Recorder`
        self.op = int(op)
        self.start = 0  # CLOCK_MONOTONIC in ns; 0: not open
        self.depth = 0
        self._outer: list[tuple[int, int]] = []  # (start, depth) of enclosing uses of this section

    def __enter__(self) -> None:
        if self.start:
            self._outer.append((self.start, self.depth))
        recorder = self.recorder
        state = recorder._state
        self.depth = depth = recorder.depth
        self.start = start = perf_counter_ns()
        if depth < FRAMES:
            base = STATE_FRAMES + depth * FRAME_WORDS
            state[base] = self.op
            state[base + 1] = start
        state[STATE_DEPTH] = recorder.depth = depth + 1

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        recorder = self.recorder
        self._leave(self.op | recorder.chunk << 32, recorder.word2, NONE_32, 0, 0)

    def _leave(self, word1: int, word2: int, peer: int, size: int, sequence: int) -> None:
        recorder = self.recorder
        start = self.start
        duration = perf_counter_ns() - start
        recorder.write(word1, word2, peer, size, sequence, start, duration)
        recorder._state[STATE_DEPTH] = recorder.depth = self.depth
        self._restore()

    def close(self) -> None:
        """Leave without writing a record."""
        self.recorder.pop(self.depth)
        self._restore()

    def _restore(self) -> None:
        if self._outer:
            self.start, self.depth = self._outer.pop()
        else:
            self.start = 0


class Pipelining(Section):
    """One pipeline action: the work on one microbatch of one chunk of the model.

    Everything recorded inside carries its microbatch and chunk.
    """

    __slots__ = ("_enclosing", "chunk", "microbatch", "peer", "sequence", "size")

    def __init__(
        self, recorder: Any, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op)
        self.microbatch = NONE_32 if microbatch is None else microbatch
        self.chunk = chunk
        self.peer = NONE_32 if peer is None else peer
        self.size = 0
        self.sequence = 0
        self._enclosing: list[tuple[int, int]] = []  # (word2, chunk) to restore, one per opening

    def __enter__(self) -> None:
        recorder = self.recorder
        self._enclosing.append((recorder.word2, recorder.chunk))
        recorder.word2 = recorder.step | self.microbatch << 32
        recorder.chunk = self.chunk
        recorder._state[STATE_MICROBATCH] = self.microbatch + 1 & NONE_32
        super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        word1, word2 = self.op | self.chunk << 32, self.recorder.word2
        self._leave(word1, word2, self.peer, self.size, self.sequence)
        self._leave_microbatch()

    def close(self) -> None:
        """Leave without writing a record."""
        super().close()
        self._leave_microbatch()

    def _leave_microbatch(self) -> None:
        recorder = self.recorder
        recorder.word2, recorder.chunk = self._enclosing.pop()
        recorder._state[STATE_MICROBATCH] = (recorder.word2 >> 32) + 1 & NONE_32


class Channel:
    """One stream of communications, numbered from 1: a group's collectives or a peer's transfers.

    Args:
        words: the words of the state page, or private memory if the page has no slot left.
        entered, left, entered_ns, latest: positions in `words`. A peer's channel stores no
            operation, so there `latest` equals `entered_ns`.
        group: id of the process group in this ring; 0 for a peer's channel.
        reference: weak reference to the process group; None for a peer's channel.
    """

    __slots__ = (
        *("_entered", "_entered_ns", "_latest", "_left", "_sequence", "_words"),
        *("group", "reference"),
    )

    def __init__(
        self,
        words: memoryview,
        entered: int,
        left: int,
        entered_ns: int,
        latest: int,
        group: int = 0,
        reference: weakref.ref[Any] | None = None,
    ) -> None:
        self._words = words
        self._entered = entered
        self._left = left
        self._entered_ns = entered_ns
        self._latest = latest
        self._sequence = 0
        self.group = group
        self.reference = reference

    def enter(self, operation: int, now_ns: int) -> int:
        """Start a communication and return its sequence number.

        Args:
            operation: `size << GROUP_BYTES_SHIFT | op`.
            now_ns: CLOCK_MONOTONIC.
        """
        self._sequence = sequence = self._sequence + 1
        words = self._words
        words[self._latest] = operation  # before the time, which may be the same word
        words[self._entered_ns] = now_ns
        words[self._entered] = sequence
        return sequence

    def leave(self, sequence: int) -> None:
        """Complete a communication. Completions may be out of order; the newest one counts."""
        words = self._words
        if words[self._left] < sequence:
            words[self._left] = sequence
