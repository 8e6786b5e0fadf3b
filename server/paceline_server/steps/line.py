"""All ranks' times of one step laid end to end, so that one sort orders everybody's moments.

A rank has a stretch of the line for itself: a day before the end of its step and a day after it,
in nanoseconds. A time further away is a lying clock's, and is brought to the stretch's end. What
is asked within a rank (what contains what, what comes when) is asked once for all of them.
"""

from __future__ import annotations

import numpy as np

from paceline_server.steps.columns import MAXIMUM_DURATION_NS, Ints, Spans
from paceline_wire.spans import Op

_STRETCH_NS = 2 * MAXIMUM_DURATION_NS + 1


class Line:
    """The ranks that ended the step, and where each lies. `Spans` sorted by rank.

    `ranks`, `begin_ns` and `end_ns` have one row per rank: when it worked on the step, from
    waiting for its data to the end of its STEP span. `owner` has one per span: its rank's row.
    `first` has one per rank and one more: where its spans begin, and those of the next.
    """

    def __init__(self, spans: Spans) -> None:
        """Every rank must have a STEP span."""
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
        last[self.owner[steps]] = steps  # of several the last
        self.end_ns: Ints = end[last]
        self.begin_ns: Ints = start[last]
        data = np.flatnonzero(spans.op == Op.DATA_WAIT)
        np.minimum.at(self.begin_ns, self.owner[data], start[data])
        self.begin_ns = np.maximum(self.begin_ns, self.end_ns - MAXIMUM_DURATION_NS)
        everyone = np.arange(first.size)
        self.begin: Ints = self.place(everyone, self.begin_ns)
        self.end: Ints = self.place(everyone, self.end_ns)
        # Of each span.
        self.span_begin: Ints = self.place(self.owner, start)
        self.span_end: Ints = self.place(self.owner, end)

    def __len__(self) -> int:
        return int(self.ranks.size)

    def place(self, owner: Ints, time_ns: Ints) -> Ints:
        since = np.clip(time_ns - self.end_ns[owner], -MAXIMUM_DURATION_NS, MAXIMUM_DURATION_NS)
        places: Ints = owner * _STRETCH_NS + MAXIMUM_DURATION_NS + since
        return places


def latest_end(begin: Ints, end: Ints, at: Ints) -> Ints:
    """Per moment of `at`: the latest end of the intervals begun by then, -1 where none was."""
    if not begin.size:
        return np.full(at.size, -1, dtype=np.int64)
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    place = np.searchsorted(begin[order], at, side="right") - 1
    found: Ints = np.where(place >= 0, reach[np.maximum(place, 0)], -1)
    return found
