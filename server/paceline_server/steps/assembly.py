"""Assemble spans into steps: a step is complete when every rank has delivered its end.

Rings are read in order, so a rank's STEP span is the last record of its step. Exceptions are
tolerated: repeated or reordered batches, a lost STEP span (the step closes without that rank once
the rank is two steps ahead), a rank without steps, records of closed steps (counted, dropped), and
invalid step numbers (the number of open steps is bounded).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from paceline_server.steps.columns import Bools, Ints, Spans, concatenate
from paceline_wire.spans import Flag, Op

# Ranks that average their weights only now and then are hundreds of steps apart (DiLoCo, federated
# averaging). That many steps may be open, as long as they hold few enough spans ...
MAXIMUM_OPEN_STEPS = 1024
MAXIMUM_OPEN_SPANS = 1 << 18  # a span takes 104 bytes, and a rank is counted as one
# ... and these in any case.
LEAST_OPEN_STEPS = 64
# A rank that has ended no step when another has ended this many more has none, as a parameter
# server: the steps are those of the others, until it ends one.
STEPS_WITHOUT_A_RANK = 32
# 2^17 spans of 104 bytes: a rank that records more in one step keeps its first ones.
MAXIMUM_SPANS_PER_RANK = 1 << 17
# Device spans are resolved at later step boundaries; at most this many later.
MAXIMUM_DELAY_STEPS = 4
_STEP_BITS = 33  # a step number, plus one value for "none"


class _OpenStep:
    __slots__ = ("counts", "ended", "parts", "size")

    def __init__(self, world_size: int) -> None:
        self.parts: list[Spans] = []
        self.size = world_size  # spans and ranks
        self.counts: Ints = np.zeros(world_size, dtype=np.int64)
        self.ended: Bools = np.zeros(world_size, dtype=np.bool_)

    def add(self, spans: Spans) -> Ints:
        """Add the spans; return the ranks whose end of the step is among them."""
        ends = spans.op == Op.STEP
        self.counts += np.bincount(spans.rank, minlength=self.counts.size)
        full = self.counts > MAXIMUM_SPANS_PER_RANK
        if full.any():
            # Keep the STEP spans; otherwise the step would never close.
            keep = ~full[spans.rank] | ends
            spans, ends = spans.where(keep), ends[keep]
        self.parts.append(spans)
        self.size += len(spans)
        ended: Ints = spans.rank[ends]
        self.ended[ended] = True
        return ended


class Assembler:
    """The open steps of one generation."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, _OpenStep] = {}
        self._open_spans = 0  # the size of all open steps
        # The newest finished step of each rank; -1: none.
        self._newest: Ints = np.full(world_size, -1, dtype=np.int64)
        self._moved: Bools = np.zeros(world_size, dtype=np.bool_)
        self._closed: int | None = None
        self._delay_steps = 0
        self.late_spans = 0  # spans of steps that were already closed
        # steps dropped because too many were open, or no rank's end was seen
        self.dropped_steps = 0

    def newest_step(self, rank: int) -> int | None:
        """Return the newest step that this rank has finished."""
        step = int(self._newest[rank])
        return None if step < 0 else step

    def has_no_steps(self, rank: int) -> bool:
        """Return whether the others finish steps without this rank."""
        return self._closed is not None and int(self._newest[rank]) < 0

    @property
    def ranks_with_steps(self) -> int:
        """The number of ranks that have finished a step."""
        return int((self._newest >= 0).sum())

    def take_moved(self) -> list[int]:
        """Return the ranks that have finished a step since the last call."""
        moved: list[int] = np.flatnonzero(self._moved).tolist()
        self._moved[:] = False
        return moved

    def add(self, spans: Spans) -> None:
        """Add spans of any ranks and steps, those of each rank in the order received."""
        valid = (spans.rank >= 0) & (spans.rank < self._world_size)
        if not valid.all():
            spans = spans.where(valid)
        if not len(spans):
            return
        self._update_delay(spans)
        steps = spans.step
        if int(steps.min()) == int(steps.max()):
            self._add_step(int(steps[0]), spans)
            return
        order = np.argsort(steps, kind="stable")
        table, steps = spans.table[:, order], steps[order]
        bounds = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), steps.size]
        for begin, end in pairwise(bounds):
            self._add_step(int(steps[begin]), Spans(table[:, begin:end]))

    def _update_delay(self, spans: Spans) -> None:
        """Measure how many steps late device spans arrive; steps are kept open that long."""
        device = (spans.flags & Flag.DEVICE) != 0
        if not device.any():
            return
        order = np.argsort(spans.rank, kind="stable")
        rank, step = spans.rank[order], spans.step[order]
        ended = np.where(spans.op[order] == Op.STEP, step + 1, 0)
        newest = np.maximum.accumulate((rank << _STEP_BITS) + ended) - (rank << _STEP_BITS) - 1
        newest = np.maximum(newest, self._newest[rank])
        late = (newest - step + 1)[device[order]]
        self._delay_steps = min(max(self._delay_steps, int(late.max())), MAXIMUM_DELAY_STEPS)

    def _add_step(self, step: int, spans: Spans) -> None:
        if self._closed is not None and step <= self._closed:
            self.late_spans += len(spans)
            late = spans.rank[spans.op == Op.STEP]
            self._newest[late] = np.maximum(self._newest[late], step)
            return
        opened = self._open.get(step)
        if opened is None:
            if self._is_full():
                self._make_room()
            opened = self._open[step] = _OpenStep(self._world_size)
            self._open_spans += opened.size
        self._open_spans -= opened.size
        ended = opened.add(spans)
        self._open_spans += opened.size
        self._newest[ended] = np.maximum(self._newest[ended], step)
        self._moved[ended] = True

    def _is_full(self) -> bool:
        count = len(self._open)
        is_large = count >= MAXIMUM_OPEN_STEPS or self._open_spans >= MAXIMUM_OPEN_SPANS
        return is_large and count >= LEAST_OPEN_STEPS

    def _make_room(self) -> None:
        """Drop a quarter of the open steps: those that the fewest ranks have ended, the oldest
        first."""
        order = sorted(self._open, key=lambda step: (int(self._open[step].ended.sum()), step))
        for step in order[: len(order) // 4]:
            self._close(step)
        self.dropped_steps += len(order) // 4

    def _close(self, step: int) -> _OpenStep:
        opened = self._open.pop(step)
        self._open_spans -= opened.size
        return opened

    def take_finished(self) -> list[tuple[int, Spans]]:
        """Return complete steps in order, each with the spans of the ranks that finished it."""
        finished = []
        for step in sorted(self._open):
            opened = self._open[step]
            if not self._is_complete(step, opened.ended):
                break
            self._close(step)
            self._closed = step
            if not opened.ended.any():
                self.dropped_steps += 1
                continue
            spans = concatenate(opened.parts)
            if not opened.ended.all():
                spans = spans.where(opened.ended[spans.rank])
            finished.append((step, spans.of_step()))
        return finished

    def _is_complete(self, step: int, ended: Bools) -> bool:
        newest = self._newest
        complete = (newest >= step + self._delay_steps) & (ended | (newest >= step + 2))
        if self._closed is not None or int(newest.max()) >= step + STEPS_WITHOUT_A_RANK:
            complete |= newest < 0
        return bool(complete.all())
