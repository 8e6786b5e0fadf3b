"""The context managers around what a training loop does: the hot path.

Objects are made once per name and reused. A section reads the clock twice, puts itself on the
state page on the way in and writes one record on the way out; it allocates nothing but integers.
`detach` moves an object to private memory in a forked child.
"""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType
from typing import Protocol

from paceline.recorder import (
    NO_CHUNK,
    NO_MICROBATCH,
    NO_TRANSFER,
    RECORD_SHIFT,
    Recorder,
    pack_record,
    pack_section,
)
from paceline_wire.ring import (
    FRAME_WORDS,
    FRAMES,
    STATE_DEPTH,
    STATE_FRAMES,
    STATE_HEAD,
    STATE_MICROBATCH,
)
from paceline_wire.spans import NONE_32, RECEIVE_OPS


class Timed(Protocol):
    """What `paceline.section` and its like return."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Inert:
    """Stands in for every context manager while there is no agent."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        return None


INERT = Inert()
_CLOSED = (0, 0)  # start and depth of a section that is not open


class Section:
    """A named part of the step. Belongs to the thread that owns the ring; may nest in itself."""

    __slots__ = ("depth", "op", "outer", "recorder", "spans", "start", "state")

    def __init__(self, recorder: Recorder, op: int) -> None:
        self.recorder = recorder
        self.state = recorder.state
        self.spans = recorder.spans
        self.op = int(op)
        self.start = 0
        self.depth = 0
        self.outer: list[tuple[int, int]] = []  # (start, depth) of the same section further out

    def __enter__(self) -> None:
        if self.start:
            self.outer.append((self.start, self.depth))
        state = self.state
        recorder = self.recorder
        self.depth = depth = recorder.depth
        self.start = start = perf_counter_ns()
        if depth < FRAMES:
            base = STATE_FRAMES + depth * FRAME_WORDS
            state[base] = self.op
            state[base + 1] = start
        state[STATE_DEPTH] = recorder.depth = depth + 1

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        start = self.start
        duration = perf_counter_ns() - start
        recorder = self.recorder
        head = recorder.head
        pack_section(
            self.spans,
            (head & recorder.mask) << RECORD_SHIFT,
            head,
            self.op,
            recorder.chunk,
            recorder.word2,
            NO_TRANSFER,
            start,
            duration,
        )
        state = self.state
        state[STATE_HEAD] = recorder.head = head + 1
        state[STATE_DEPTH] = recorder.depth = self.depth
        if self.outer:
            self.start, self.depth = self.outer.pop()
        else:
            self.start = 0

    def close(self) -> None:
        """Leave without a record."""
        self.recorder.pop(self.depth)
        self.start, self.depth = self.outer.pop() if self.outer else _CLOSED

    def detach(self) -> None:
        self.state = self.recorder.state
        self.spans = self.recorder.spans


class StatusSection(Section):
    """A section during which the state page shows another status: checkpoint, evaluation."""

    __slots__ = ("before", "status")

    def __init__(self, recorder: Recorder, op: int, status: int) -> None:
        super().__init__(recorder, op)
        self.status = status
        self.before: list[int] = []

    def __enter__(self) -> None:
        self.before.append(self.recorder.status)
        self.recorder.set_status(self.status)
        super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        super().__exit__(kind, error, trace)
        self.recorder.set_status(self.before.pop())


class ElsewhereSection:
    """A section of a thread that does not own the ring: timed, written at the next boundary."""

    __slots__ = ("recorder", "start", "word1")

    def __init__(self, recorder: Recorder, op: int) -> None:
        self.recorder = recorder
        self.word1 = op | NO_CHUNK << 32
        self.start = 0

    def __enter__(self) -> None:
        self.start = perf_counter_ns()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        recorder = self.recorder
        duration = perf_counter_ns() - self.start
        word2 = recorder.step | NO_MICROBATCH
        recorder.enqueue((self.word1, word2, NONE_32, 0, 0, self.start, duration))


class Pipelining(Section):
    """One pipeline action: the work on one microbatch of one chunk of the model.

    Whatever is recorded inside carries its microbatch and chunk.
    """

    __slots__ = ("chunk", "microbatch", "peer", "sequence", "size")

    def __init__(
        self, recorder: Recorder, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op)
        self.microbatch = NONE_32 if microbatch is None else microbatch
        self.chunk = chunk
        self.peer = NONE_32 if peer is None else peer
        self.size = 0
        self.sequence = 0

    def __enter__(self) -> None:
        recorder = self.recorder
        recorder.outer.append((recorder.word2, recorder.chunk, recorder.action))
        microbatch = self.microbatch
        recorder.word2 = recorder.step | microbatch << 32
        recorder.chunk = self.chunk
        if self.start:
            self.outer.append((self.start, self.depth))
        state = self.state
        state[STATE_MICROBATCH] = microbatch + 1 & NONE_32
        self.depth = depth = recorder.depth
        self.start = start = perf_counter_ns()
        if depth < FRAMES:
            base = STATE_FRAMES + depth * FRAME_WORDS
            state[base] = self.op
            state[base + 1] = start
        state[STATE_DEPTH] = recorder.depth = depth + 1

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        start = self.start
        duration = perf_counter_ns() - start
        recorder = self.recorder
        head = recorder.head
        pack_record(
            self.spans,
            (head & recorder.mask) << RECORD_SHIFT,
            head,
            self.op | self.chunk << 32,
            recorder.word2,
            self.peer,
            self.size,
            self.sequence,
            start,
            duration,
        )
        state = self.state
        state[STATE_HEAD] = recorder.head = head + 1
        state[STATE_DEPTH] = recorder.depth = self.depth
        word2, recorder.chunk, recorder.action = recorder.outer.pop()
        recorder.word2 = word2
        state[STATE_MICROBATCH] = (word2 >> 32) + 1 & NONE_32
        if self.outer:
            self.start, self.depth = self.outer.pop()
        else:
            self.start = 0

    def close(self) -> None:
        recorder = self.recorder
        word2, recorder.chunk, recorder.action = recorder.outer.pop()
        recorder.word2 = word2
        self.state[STATE_MICROBATCH] = (word2 >> 32) + 1 & NONE_32
        super().close()


class Transfer(Pipelining):
    """A pipeline action that sends or receives.

    A torch.distributed transfer in its direction made inside it is not recorded by itself but
    lends the action its peer, bytes and sequence number. An action that only launched transfers
    which are still under way when it ends writes nothing: each is recorded when it completes.
    """

    __slots__ = ("completed", "given_peer", "launched", "receives")

    def __init__(
        self, recorder: Recorder, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op, microbatch, chunk, peer)
        self.given_peer = self.peer
        self.receives = op in RECEIVE_OPS
        self.launched = 0
        self.completed = 0

    def __enter__(self) -> None:
        super().__enter__()
        self.recorder.action = self
        self.peer = self.given_peer
        self.size = self.sequence = self.launched = self.completed = 0
        if self.peer != NONE_32:
            self.shows(self.peer, 0)

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        if self.launched and not self.completed:
            self.close()
            return
        super().__exit__(kind, error, trace)
        if self.peer != NONE_32:
            self.recorder.clear_place()

    def shows(self, place: int, sequence: int) -> None:
        """Name on the state page the transfer this action is blocked in."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self.state[base + 2] = place
            self.state[base + 3] = sequence

    def carries(self, peer: int, size: int, sequence: int) -> None:
        """A transfer of this action has completed inside it."""
        self.completed += 1
        self.peer = peer
        self.size += size
        self.sequence = sequence
