"""State pages in the middle of a step: the operations that each rank is in, and what it waits for.

In a step that never ends (a hang) this is the final state.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from paceline_evaluation.emission import BOOT_OFFSET_NS, START_NS, Emission
from paceline_evaluation.program import ProgramSpan
from paceline_evaluation.timeline import Timeline
from paceline_wire.ring import Frame, GroupProgress, PeerProgress, StateView
from paceline_wire.spans import COMPUTE_OPS, Op


@dataclass(slots=True)
class _Group:
    op: int
    entered: int
    left: int
    entered_ns: int = 0


@dataclass(slots=True)
class _Peer:
    sent: list[int] = field(default_factory=lambda: [0, 0])  # [entered, left]
    received: list[int] = field(default_factory=lambda: [0, 0])
    entered_ns: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment within step `step`; `number`: its index in the timeline."""

    timeline: Timeline
    number: int
    step: int
    begin_seconds: float  # start of the step, since the start of the job
    seconds: float = math.inf  # since the start of the step; infinite: when all ranks are blocked


def view_at(emission: Emission, rank: int, moment: Moment) -> StateView:
    """Return the state page of a rank at a moment."""
    return _Page(emission, rank, moment).view()


class _Page:
    def __init__(self, emission: Emission, rank: int, moment: Moment) -> None:
        self.emission, self.rank, self.step = emission, rank, moment.step
        self.begin_seconds = moment.begin_seconds
        self.now = min(moment.seconds, sys.float_info.max)
        timeline = moment.timeline
        self.place = emission.shape.topology.coordinates(rank)
        self.stage = self.place.pp_rank
        here = (slice(None), moment.number, self.place.dp_rank, self.place.tp_rank)
        self.start, self.end = timeline.start[self.stage][here], timeline.end[self.stage][here]
        self.frames: list[tuple[int, Frame]] = []  # depth, frame
        self.groups: dict[int, _Group] = {}
        self.peers: dict[int, _Peer] = {}

    def view(self) -> StateView:
        for position, row in enumerate(self.emission.program.rows[self.stage]):
            self._add(position, row)
        named = self.emission.program.named[self.stage]
        in_checkpoint = any(frame.op == Op.CHECKPOINT for _, frame in self.frames)
        return StateView(
            head=int(self.emission.heads[self.rank] + (self.end <= self.now).sum()),
            step=self.step,
            step_started_ns=self._clock(named["step"]),
            microbatch=None,
            status="checkpointing" if in_checkpoint else "running",
            loss_step=self.step - 1 if self.step else None,
            loss=2.0 if self.step else None,
            gradient_norm=None,
            evaluation_step=None,
            evaluation_loss=None,
            frames=[frame for _, frame in sorted(self.frames, key=lambda frame: frame[0])],
            groups=[
                GroupProgress(group, one.entered, one.left, one.entered_ns, one.op)
                for group, one in sorted(self.groups.items())
            ],
            peers=[
                PeerProgress(
                    peer, one.sent[0], one.sent[1], one.received[0], one.received[1], one.entered_ns
                )
                for peer, one in sorted(self.peers.items())
            ],
        )

    def _clock(self, position: int) -> int:
        """Return the start of a row on CLOCK_MONOTONIC."""
        seconds = self.begin_seconds + float(self.start[position])
        return int(seconds * 1e9) + START_NS - BOOT_OFFSET_NS

    def _add(self, position: int, row: ProgramSpan) -> None:
        entered = bool(self.start[position] <= self.now)
        left = bool(self.end[position] <= self.now)
        sequence = row.sequence + int(self.emission.increments[self.stage][position]) * self.step
        peer = None
        if row.peer_stage is not None:
            topology = self.emission.shape.topology
            peer = topology.rank(self.place.dp_rank, row.peer_stage, self.place.tp_rank)
            self._exchange(position, row, peer, sequence, entered, left)
        elif row.group:
            self._collect(position, row, sequence, entered, left)
        if entered and not left and not row.is_async:
            depth = 0 if row.op == Op.STEP else 1 if row.op in COMPUTE_OPS else 2
            frame = Frame(row.op, self._clock(position), row.group, peer, sequence)
            self.frames.append((depth, frame))

    def _exchange(
        self, position: int, row: ProgramSpan, peer: int, sequence: int, entered: bool, left: bool
    ) -> None:
        progress = self.peers.setdefault(peer, _Peer())
        counts = progress.sent if row.is_async else progress.received
        if not any(counts):  # the step has not begun: the state after the previous steps
            counts[:] = [sequence - 1, sequence - 1]
        if entered:
            counts[0] = max(counts[0], sequence)
            progress.entered_ns = max(progress.entered_ns, self._clock(position))
        if left:
            counts[1] = max(counts[1], sequence)

    def _collect(
        self, position: int, row: ProgramSpan, sequence: int, entered: bool, left: bool
    ) -> None:
        progress = self.groups.setdefault(row.group, _Group(row.op, sequence - 1, sequence - 1))
        if entered:
            progress.op, progress.entered = row.op, max(progress.entered, sequence)
            progress.entered_ns = max(progress.entered_ns, self._clock(position))
        if left:
            progress.left = max(progress.left, sequence)
