"""The times of all ranks in one step on a single axis, so that one sort orders them all.

Each rank has a section of the axis for itself: from a day before the end of its step to a day after
it, in nanoseconds. Times outside of it come from a wrong clock and are clipped. Relations between
the spans of one rank (which contains which, which comes first) can then be computed for all ranks
at once.
"""

from __future__ import annotations

import numpy as np

from paceline_server.steps.columns import MAXIMUM_DURATION_NS, Ints, Spans
from paceline_wire.spans import Op

_SECTION_NS = 2 * MAXIMUM_DURATION_NS + 1


class StepTimeline:
    """The ranks that finished the step, with their sections. The spans are sorted by rank.

    `ranks`, `begin_ns` and `end_ns` have one row per rank: the time it worked on the step, from
    its wait for data to the end of its STEP span. `owner` has one row per span: the row of its
    rank. `first` has one row per rank and one more: the index of the rank's first span.
    """

    def __init__(self, spans: Spans) -> None:
        """Create the timeline; every rank must have a STEP span."""
        rank = spans.rank
        changes = np.flatnonzero(np.diff(rank)) + 1
        first = np.concatenate([[0], changes])
        self.first: Ints = np.concatenate([first, [rank.size]])
        sizes = np.diff(self.first)
        self.ranks: Ints = rank[first]
        self.owner: Ints = np.repeat(np.arange(first.size), sizes)
        start, end = spans.start_ns, spans.end_ns
        steps = np.flatnonzero(spans.op == Op.STEP)
        last = np.empty(first.size, dtype=np.int64)
        last[self.owner[steps]] = steps  # the last STEP span of a rank
        self.end_ns: Ints = end[last]
        self.begin_ns: Ints = start[last]
        data = np.flatnonzero(spans.op == Op.DATA_WAIT)
        np.minimum.at(self.begin_ns, self.owner[data], start[data])
        self.begin_ns = np.maximum(self.begin_ns, self.end_ns - MAXIMUM_DURATION_NS)
        rows = np.arange(first.size)
        self.begin: Ints = self.place(rows, self.begin_ns)
        self.end: Ints = self.place(rows, self.end_ns)
        # One row per span:
        self.span_begin: Ints = self.place(self.owner, start)
        self.span_end: Ints = self.place(self.owner, end)

    def __len__(self) -> int:
        return int(self.ranks.size)

    def place(self, owner: Ints, time_ns: Ints) -> Ints:
        since = np.clip(time_ns - self.end_ns[owner], -MAXIMUM_DURATION_NS, MAXIMUM_DURATION_NS)
        places: Ints = owner * _SECTION_NS + MAXIMUM_DURATION_NS + since
        return places


def latest_end(begin: Ints, end: Ints, at: Ints) -> Ints:
    """Return, for each time in `at`, the latest end of the intervals that have begun by then; -1:
    none."""
    if not begin.size:
        return np.full(at.size, -1, dtype=np.int64)
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    place = np.searchsorted(begin[order], at, side="right") - 1
    found: Ints = np.where(place >= 0, reach[np.maximum(place, 0)], -1)
    return found
