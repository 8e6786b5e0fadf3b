"""The writer's end of a ring in Python: the reference for `_native.c`, and its stand-in.

One thread owns the ring, the one that made the `Writer`; it alone writes records and frames, so no
lock is needed. A record is written before the head that announces it, a frame before the depth.
"""

from __future__ import annotations

import math
import struct
import weakref
from _thread import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, SupportsFloat

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
from paceline_wire.spans import NONE_16, NONE_32, RECORD_BYTES, WORDS, Op

if TYPE_CHECKING:
    from paceline.writer.device import DeviceTimer
    from paceline.writer.sections import Transfer

NO_CHUNK = NONE_16  # upper half of word 1: chunk, and no flags
NO_MICROBATCH = NONE_32 << 32  # in word 2
NO_PLACE = NONE_32  # a frame's `group << 32 | peer`: no group, no peer

_pack_record = struct.Struct(f"<{WORDS}Q").pack_into
_pack_float = struct.Struct("<d").pack
_float_bits = struct.Struct("<Q").unpack


class Writer:
    """Records and the stack of operations in flight.

    `word2` holds the step and microbatch of what is going on, as a record wants them, and `chunk`
    the upper half of word 1; sections copy both. `state`: the words of the state page, `spans`: the
    memory of a power of two of records.
    """

    __slots__ = (
        *("_spans", "_state", "action", "calling", "chunk", "depth", "failures", "head", "mask"),
        *("owner", "sections", "step", "step_head", "step_started_ns", "timer", "word2"),
    )

    def __init__(self, state: memoryview, spans: memoryview) -> None:
        self.head = 0
        self.depth = 0
        self.step = 0
        self.step_started_ns = 0
        self.step_head = 0  # records at the end of the step's data wait
        self.chunk = NO_CHUNK
        self.word2 = NO_MICROBATCH
        self.owner = get_ident()
        self.calling = False  # the owner's thread is inside a timed torch.distributed function
        self.timer: DeviceTimer | None = None
        self.action: Transfer | None = None  # the transfer action we are in
        self.sections: dict[object, Section] = {}  # the owner's, by name
        self.failures = 0  # exceptions of our own that were kept from the training
        self.rebind(state, spans)

    def rebind(self, state: memoryview, spans: memoryview) -> None:
        """Write there from now on."""
        self._state = state
        self._spans = spans
        self.mask = len(spans) // RECORD_BYTES - 1

    def write(
        self, word1: int, word2: int, peer: int, size: int, sequence: int, start: int, length: int
    ) -> None:
        """Append one record; owner thread only. Words as `paceline_wire.spans` lays them out."""
        head = self.head
        offset = (head & self.mask) * RECORD_BYTES
        _pack_record(self._spans, offset, head, word1, word2, peer, size, sequence, start, length)
        self._state[STATE_HEAD] = self.head = head + 1

    def write_simple(self, op: int, start_ns: int, end_ns: int) -> None:
        """A record of the current step that belongs to no microbatch, chunk or peer."""
        step = self.step | NO_MICROBATCH
        self.write(op | NO_CHUNK << 32, step, NONE_32, 0, 0, start_ns, end_ns - start_ns)

    def push(self, op: int, start_ns: int, place: int, sequence: int) -> int:
        """Put a frame on the state page. Returns the depth to give to `pop`."""
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
        self._state[STATE_DEPTH] = self.depth = depth
        self.clear_place()

    def clear_place(self) -> None:
        """Leave no place and no sequence in the free frame above the open ones: sections rely on
        it."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self._state[base + 2] = NO_PLACE
            self._state[base + 3] = 0

    def clear_frames(self) -> None:
        """Whatever an exception or an early exit left behind."""
        for depth in reversed(range(min(self.depth, FRAMES))):
            self.pop(depth)
        self._state[STATE_DEPTH] = self.depth = 0

    def begin_step(self, step: int) -> None:
        """A step begins with the wait for its data."""
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
        self.pop(1)
        self.write_simple(Op.DATA_WAIT, self.step_started_ns, perf_counter_ns())
        self.step_head = self.head

    def end_step(self) -> None:
        self.write_simple(Op.STEP, self.step_started_ns, perf_counter_ns())

    def report(
        self,
        step: int,
        loss: SupportsFloat | None,
        gradient_norm: SupportsFloat | None,
        evaluation_loss: SupportsFloat | None,
    ) -> None:
        """Show these values of `step` on the state page."""
        state = self._state
        lost, evaluated = _bits(loss), _bits(evaluation_loss)
        norm = math.nan if gradient_norm is None else _number(gradient_norm)
        if gradient_norm is not None and not math.isfinite(norm):
            norm = math.inf  # NaN says "not given" on the page
        if lost is not None:
            state[STATE_LOSS] = lost
            state[STATE_GRADIENT_NORM] = _bits(norm)
            state[STATE_LOSS_STEP] = step + 1
        if evaluated is not None:
            state[STATE_EVALUATION_LOSS] = evaluated
            state[STATE_EVALUATION_STEP] = step + 1

    def report_here(
        self,
        loss: SupportsFloat | None,
        gradient_norm: SupportsFloat | None,
        evaluation_loss: SupportsFloat | None,
    ) -> bool:
        """Whether these values of the current step are shown: not by another thread, nor where a
        device may still compute them, nor what is no number."""
        if get_ident() != self.owner or self.timer is not None:
            return False
        try:
            self.report(self.step, loss, gradient_norm, evaluation_loss)
        except Exception:  # whoever does it the general way meets it again
            return False
        return True

    def known(self, name: object) -> Section | None:
        """The section of this name, in the owner's thread."""
        if get_ident() != self.owner:
            return None
        try:
            return self.sections.get(name)
        except TypeError:  # no name
            return None


def _bits(value: SupportsFloat | None) -> Any:
    """A float as a word of the page; None for None."""
    return None if value is None else _float_bits(_pack_float(_number(value)))[0]


def _number(value: Any) -> float:
    """A tensor that has a gradient warns where it is turned into a float, and not as an item."""
    return float(value.item() if hasattr(value, "item") else value)


class Section:
    """A named part of the step. Belongs to the thread that owns the ring; may nest in itself."""

    __slots__ = ("_outer", "depth", "op", "recorder", "start")

    def __init__(self, recorder: Any, op: int) -> None:
        self.recorder = recorder
        self.op = int(op)
        self.start = 0
        self.depth = 0
        self._outer: list[tuple[int, int]] = []  # (start, depth) of the same section further out

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
        """Leave without a record."""
        self.recorder.pop(self.depth)
        self._restore()

    def _restore(self) -> None:
        if self._outer:
            self.start, self.depth = self._outer.pop()
        else:
            self.start = 0


class Pipelining(Section):
    """One pipeline action: the work on one microbatch of one chunk of the model.

    Whatever is recorded inside carries its microbatch and chunk.
    """

    __slots__ = ("_around", "chunk", "microbatch", "peer", "sequence", "size")

    def __init__(
        self, recorder: Any, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op)
        self.microbatch = NONE_32 if microbatch is None else microbatch
        self.chunk = chunk
        self.peer = NONE_32 if peer is None else peer
        self.size = 0
        self.sequence = 0
        self._around: list[tuple[int, int]] = []  # (word2, chunk) outside of each time it is open

    def __enter__(self) -> None:
        recorder = self.recorder
        self._around.append((recorder.word2, recorder.chunk))
        recorder.word2 = recorder.step | self.microbatch << 32
        recorder.chunk = self.chunk
        recorder._state[STATE_MICROBATCH] = self.microbatch + 1 & NONE_32
        super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        word1, word2 = self.op | self.chunk << 32, self.recorder.word2
        self._leave(word1, word2, self.peer, self.size, self.sequence)
        self._leave_microbatch()

    def close(self) -> None:
        super().close()
        self._leave_microbatch()

    def _leave_microbatch(self) -> None:
        recorder = self.recorder
        recorder.word2, recorder.chunk = self._around.pop()
        recorder._state[STATE_MICROBATCH] = (recorder.word2 >> 32) + 1 & NONE_32


class Channel:
    """One stream of communications, numbered from 1.

    `entered`, `left`, `since` and `latest` are positions in `words`: those of the state page, or
    of private memory for a channel that found no room there. `group`: the id of a process group in
    this ring; `reference`: to the process group, weak. A peer's channel has neither.
    """

    __slots__ = (
        *("_entered", "_latest", "_left", "_sequence", "_since", "_words"),
        *("group", "reference"),
    )

    def __init__(
        self,
        words: memoryview,
        entered: int,
        left: int,
        since: int,
        latest: int,
        group: int = 0,
        reference: weakref.ref[Any] | None = None,
    ) -> None:
        self._words = words
        self._entered = entered
        self._left = left
        self._since = since
        self._latest = latest
        self._sequence = 0
        self.group = group
        self.reference = reference

    def enter(self, what: int, now: int) -> int:
        """`what`: `size << GROUP_BYTES_SHIFT | op`."""
        self._sequence = sequence = self._sequence + 1
        words = self._words
        words[self._latest] = what  # a peer keeps no op: there it is the same word as `since`
        words[self._since] = now
        words[self._entered] = sequence
        return sequence

    def leave(self, sequence: int) -> None:
        """Asynchronous ones may complete out of order; the newest stands."""
        words = self._words
        if words[self._left] < sequence:
            words[self._left] = sequence
