"""The context managers that time parts of a training step: the hot path.

Each object is created once per name and reused. A section reads the clock twice, shows itself on
the state page while it is open and writes one record when it closes.
"""

from __future__ import annotations

from time import perf_counter_ns

from paceline.recorder import Recorder
from paceline.writer import Pipelining, Section
from paceline.writer.interface import NO_CHUNK, NO_MICROBATCH, TransferAction
from paceline_wire.ring import FRAME_WORDS, FRAMES, STATE_FRAMES
from paceline_wire.spans import NONE_32, RECEIVE_OPS


class Inert:
    """A context manager that does nothing; replaces all others while nothing is recorded."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        return None


INERT = Inert()


class StatusSection(Section):
    """A section that shows its own status on the state page: checkpoint or evaluation."""

    __slots__ = ("previous", "status")

    def __init__(self, recorder: Recorder, op: int, status: int) -> None:
        super().__init__(recorder, op)
        self.status = status
        self.previous: list[int] = []

    def __enter__(self) -> None:
        self.previous.append(self.recorder.status)
        self.recorder.set_status(self.status)
        super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        super().__exit__(kind, error, trace)
        previous = self.previous.pop()
        if self.recorder.status == self.status:  # `finish` inside the block changes it permanently
            self.recorder.set_status(previous)


class OtherThreadSection:
    """A section in a thread that does not own the ring; it is written at the next step boundary."""

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

    A torch.distributed transfer inside it, in the same direction, is not recorded separately.
    Instead the action gets its peer, bytes and sequence number. An action writes no record if all
    transfers that it launched are still in flight when it ends: each of them is recorded when it
    completes.
    """

    __slots__ = (
        *("completed", "enclosing_actions", "given_peer", "launched_before", "receives", "word"),
    )

    def __init__(
        self, recorder: Recorder, op: int, microbatch: int | None, chunk: int, peer: int | None
    ) -> None:
        super().__init__(recorder, op, microbatch, chunk, peer)
        self.enclosing_actions: list[TransferAction | None] = []
        self.given_peer = self.peer
        self.receives = op in RECEIVE_OPS
        self.word = 1 << 17 | self.receives << 16 | op
        self.launched_before = 0  # value of `recorder.transfers_launched` at its start
        self.completed = 0

    def __enter__(self) -> None:
        super().__enter__()
        self.enclosing_actions.append(self.recorder.action)
        self.recorder.action, self.recorder.transfer = self, self.word
        self.launched_before = self.recorder.transfers_launched
        self.peer = self.given_peer
        self.size = self.sequence = self.completed = 0
        if self.peer != NONE_32:
            self.show_transfer(self.peer, 0)

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        if self.is_in_flight:
            self.close()
            return
        super().__exit__(kind, error, trace)
        self._restore_enclosing()
        if self.peer != NONE_32:
            self.recorder.clear_place()

    def close(self) -> None:
        """Leave without writing a record."""
        super().close()
        self._restore_enclosing()

    def _restore_enclosing(self) -> None:
        action = self.enclosing_actions.pop()
        self.recorder.action, self.recorder.transfer = action, 0 if action is None else action.word

    @property
    def is_in_flight(self) -> bool:
        """Return whether the action launched transfers and none of them has completed."""
        launched = self.recorder.transfers_launched > self.launched_before
        return launched and not self.completed

    def show_transfer(self, place: int, sequence: int) -> None:
        """Show on the state page the transfer that blocks this action."""
        if self.depth < FRAMES:
            base = STATE_FRAMES + self.depth * FRAME_WORDS
            self.recorder.state[base + 2] = place
            self.recorder.state[base + 3] = sequence

    def add_transfer(self, peer: int, size: int, sequence: int) -> None:
        """Count a transfer that completed inside this action."""
        self.completed += 1
        self.peer = peer
        self.size += size
        self.sequence = sequence
