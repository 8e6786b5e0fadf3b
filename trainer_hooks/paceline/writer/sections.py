"""The context managers around what a training loop does: the hot path.

Objects are made once per name and reused. A section reads the clock twice, puts itself on the
state page on the way in and writes one record on the way out.
"""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType
from typing import Protocol

from paceline.recorder import Recorder
from paceline.writer import Pipelining, Section
from paceline.writer.pure import NO_CHUNK, NO_MICROBATCH
from paceline_wire.ring import FRAME_WORDS, FRAMES, STATE_FRAMES
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
        before = self.before.pop()
        if self.recorder.status == self.status:  # else it was finished in here
            self.recorder.set_status(before)


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


class Transfer(Pipelining):
    """A pipeline action that sends or receives.

    A torch.distributed transfer in its direction made inside it is not recorded by itself but
    lends the action its peer, bytes and sequence number. An action that only launched transfers
    which are still under way when it ends writes nothing: each is recorded when it completes.
    """

    __slots__ = ("around", "completed", "given_peer", "launched", "receives")

    def __init__(
        self, recorder: Recorder, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op, microbatch, chunk, peer)
        self.around: list[Transfer | None] = []
        self.given_peer = self.peer
        self.receives = op in RECEIVE_OPS
        self.launched = 0
        self.completed = 0

    def __enter__(self) -> None:
        super().__enter__()
        self.around.append(self.recorder.action)
        self.recorder.action = self
        self.peer = self.given_peer
        self.size = self.sequence = self.launched = self.completed = 0
        if self.peer != NONE_32:
            self.shows(self.peer, 0)

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        if self.is_under_way:
            self.close()
            return
        super().__exit__(kind, error, trace)
        self.recorder.action = self.around.pop()
        if self.peer != NONE_32:
            self.recorder.clear_place()

    def close(self) -> None:
        super().close()
        self.recorder.action = self.around.pop()

    @property
    def is_under_way(self) -> bool:
        """It launched transfers, and none has completed."""
        return self.launched > 0 and not self.completed

    def shows(self, place: int, sequence: int) -> None:
        """Name on the state page the transfer this action is blocked in."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self.recorder.state[base + 2] = place
            self.recorder.state[base + 3] = sequence

    def carries(self, peer: int, size: int, sequence: int) -> None:
        """A transfer of this action has completed inside it."""
        self.completed += 1
        self.peer = peer
        self.size += size
        self.sequence = sequence
