"""Communication that was in flight while the training thread was not blocked in communication."""

from __future__ import annotations

import numpy as np

from paceline_server.steps.columns import COMMUNICATION, Bools, Ints, Spans, one_of
from paceline_server.steps.timeline import StepTimeline
from paceline_server.steps.timing import Floats
from paceline_wire.spans import Flag


def overlapped_seconds(spans: Spans, timeline: StepTimeline) -> Floats:
    """Return the overlapped communication of each rank in a step.

    An ASYNC span lasts from the launch to the completion, the other spans as long as the host was
    blocked. Time in which several are in flight counts once.
    """
    communicates = one_of(spans.op, COMMUNICATION)
    launched = (spans.flags & Flag.ASYNC) != 0
    if not (communicates & launched).any():
        return np.zeros(len(timeline))
    in_flight = _covered_ns(communicates, timeline)
    overlapped: Floats = (in_flight - _covered_ns(communicates & ~launched, timeline)) / 1e9
    return overlapped


def _covered_ns(chosen: Bools, timeline: StepTimeline) -> Ints:
    """Return for each rank the time of its step that the chosen spans cover."""
    rows = np.flatnonzero(chosen)
    order = np.argsort(timeline.span_begin[rows], kind="stable")
    rows = rows[order]
    owner = timeline.owner[rows]
    # Each rank has a section of the axis, and spans are clipped to its step: ranks cannot overlap.
    begin, end = (
        np.clip(place[rows], timeline.begin[owner], timeline.end[owner])
        for place in (timeline.span_begin, timeline.span_end)
    )
    reached = np.concatenate([[-1], np.maximum.accumulate(end)[:-1]]) if rows.size else end
    length = np.maximum(end - np.maximum(begin, reached), 0)
    covered: Ints = np.zeros(len(timeline), dtype=np.int64)
    np.add.at(covered, owner, length)
    return covered
