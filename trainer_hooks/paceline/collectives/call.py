"""One collective or transfer, from its launch to its completion.

The kernel creates a `CommunicationCall` and calls `block` before and `launched` after the launch.
If the caller waits immediately, the call is one span: `block`, the wait, `complete`. If it waits
later, `wait` and `complete_work` surround the wait. `complete_unwaited` ends a call that no thread
waited for.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns
from typing import Any

from paceline.collectives.operations import TRANSFERS, payload_bytes
from paceline.device import on_device
from paceline.recorder import Recorder
from paceline.writer import Channel
from paceline.writer.interface import NO_CHUNK, NO_MICROBATCH, Event, Row, TransferAction
from paceline_wire.ring import GROUP_BYTES_SHIFT
from paceline_wire.spans import Flag, Op


class CommunicationCall:
    """The timing of one collective or transfer."""

    __slots__ = (
        "action",
        "action_started_ns",
        "blocks",
        "channel",
        "depth",
        "graph_task",
        "launched_ns",
        "op",
        "output",
        "peer",
        "place",
        "recorder",
        "sequence",
        "size",
        "started",
        "started_ns",
        "timer",
        "wait_started",
        "wait_started_ns",
        "word1",
        "word2",
    )

    def __init__(
        self,
        recorder: Recorder,
        op: int,
        group: int,
        channel: Channel,
        peer: int,
        payload: Any,
        blocks: bool | None,
    ) -> None:
        self.recorder = recorder
        self.channel = channel
        self.peer = peer
        self.blocks = blocks  # whether the caller waits immediately; None: unknown
        self.size = payload_bytes(payload)
        self.output: int | None = None  # address of the result
        self.graph_task = -1  # the backward pass that launched it
        self.launched_ns = 0
        self.timer = recorder.timer if on_device(payload) else None
        self.depth: int | None = None
        self.action: TransferAction | None = None
        if recorder.owner == get_ident():
            self.word2 = recorder.word2
            chunk = recorder.chunk
            action = recorder.action
            direction = None if op not in TRANSFERS else op == Op.RECV
            if action is not None and action.receives is direction:
                self.action = action
                self.action_started_ns = action.start
                op = action.op
        else:
            self.word2 = recorder.step | NO_MICROBATCH
            chunk = NO_CHUNK
        self.op = op
        self.word1 = op | group << 16 | chunk << 32
        self.place = group << 32 | peer
        self.started = None if self.timer is None else self.timer.mark()
        self.wait_started: Event | None = None
        self.wait_started_ns: int | None = None
        self.started_ns = perf_counter_ns()
        self.sequence = channel.enter(op | self.size << GROUP_BYTES_SHIFT, self.started_ns)

    def block(self, now_ns: int) -> None:
        """Show on the state page that this call is about to block the owner thread."""
        if self.recorder.owner != get_ident():
            return
        action = self._open_action()
        if action is not None:
            action.show_transfer(self.place, self.sequence)
        else:
            self.depth = self.recorder.push(self.op, now_ns, self.place, self.sequence)

    def unblock(self) -> None:
        """Remove this call from the state page."""
        if self.depth is not None:
            self.recorder.pop(self.depth)
            self.depth = None

    def launched(self) -> None:
        """End the launch; the caller continues."""
        self.unblock()
        if self.action is not None:
            self.recorder.transfers_launched += 1
        self.launched_ns = perf_counter_ns()

    def complete(self) -> None:
        """Record a blocking call that has returned."""
        now = perf_counter_ns()
        self.unblock()
        self.channel.leave(self.sequence)
        if not self._add_to_action():
            ended = None if self.timer is None else self.timer.mark()
            flag = Flag.ASYNC if self._is_in_background() else Flag.NONE
            self._record(flag, self.started_ns, now, self.started, ended)

    def wait(self, completed: bool) -> None:
        """Start the host's wait for an asynchronous call, unless it has already completed."""
        if completed or self._is_in_background():
            return
        self.wait_started_ns = perf_counter_ns()
        self.block(self.wait_started_ns)
        if self.timer is not None:
            self.wait_started = self.timer.mark()

    def complete_work(self) -> None:
        """Record an asynchronous call whose `Work.wait` has returned, and that wait."""
        now = perf_counter_ns()
        self.unblock()
        self.channel.leave(self.sequence)
        if self._add_to_action():
            return
        ended = None if self.timer is None else self.timer.mark()
        self._record(Flag.ASYNC, self.started_ns, now, self.started, ended)
        if self.wait_started_ns is not None:
            # Needs an event of its own: each pair returns to the pool separately.
            ended = None if self.timer is None else self.timer.mark()
            self._record(Flag.WAIT, self.wait_started_ns, now, self.wait_started, ended)

    def complete_unwaited(self) -> None:
        """Record a call that is found complete, without a wait. Any thread may have launched it."""
        self.channel.leave(self.sequence)
        if not self._add_to_action():
            self._record(Flag.ASYNC, self.started_ns, perf_counter_ns(), None, None)

    def _is_in_background(self) -> bool:
        """Return whether a thread other than the training's makes this call, such as a checkpoint
        writer.

        Such a call does not block the training. With a device it may: autograd's thread is part of
        the training.
        """
        return self.timer is None and self.recorder.owner != get_ident()

    def _open_action(self) -> TransferAction | None:
        """Return the transfer action that this call was made in, if it is still open."""
        action = self.action
        if action is None or action is not self.recorder.action:
            return None
        return action if action.start == self.action_started_ns else None

    def _add_to_action(self) -> bool:
        action = self._open_action()
        if action is None or self.recorder.owner != get_ident():
            return False
        action.add_transfer(self.peer, self.size, self.sequence)
        return True

    def _record(
        self, flag: int, start_ns: int, end_ns: int, started: Event | None, ended: Event | None
    ) -> None:
        row = self._row(flag, start_ns, end_ns)
        if self.timer is not None and started is not None and ended is not None:
            self.timer.enqueue((*row[:5], started, ended))
        elif self.recorder.owner == get_ident():
            self.recorder.write(*row)
        else:
            self.recorder.enqueue(row)

    def _row(self, flag: int, start_ns: int, end_ns: int) -> Row:
        word1 = self.word1 | flag << 48
        duration_ns = end_ns - start_ns
        return word1, self.word2, self.peer, self.size, self.sequence, start_ns, duration_ns
