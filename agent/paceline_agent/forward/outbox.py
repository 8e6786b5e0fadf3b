"""What waits to be packed into the next batch."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paceline_agent.collect.blocks import SeriesBlock
from paceline_wire.batch import (
    AgentHello,
    CommandResult,
    DeviceEvent,
    Event,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankDump,
    RankExited,
    RankStackTraces,
    RankStarted,
    RankState,
    Sample,
    SampleBlock,
    SpanBlock,
)

URGENT = (
    AgentHello,
    RankStarted,
    RankExited,
    RankAcknowledged,
    RankStackTraces,
    RankDump,
    CommandResult,
    DeviceEvent,
)
_OF_RANK = (RankStarted, RankAttached, RankDefined, RankState, RankAcknowledged, RankExited)
SPAN_BYTES_PER_BATCH = 4 << 20  # packed, well below what the server takes
SAMPLES_PER_BATCH = 8_000  # of a large node three seconds' worth, the longest a server asks for
EVENTS_PER_BATCH = 2_000


def is_of_rank(event: Event) -> bool:
    """It means something only after what the rank's ring said before."""
    return isinstance(event, _OF_RANK)


class News(NamedTuple):
    """What goes into one batch."""

    events: list[Event]
    spans: list[SpanBlock]
    samples: list[Sample]
    blocks: list[SampleBlock]


class Outbox:
    """Gathers news in the order it came; `urgent` is set when it should not wait."""

    def __init__(self) -> None:
        self.urgent = asyncio.Event()
        self._events: deque[Event] = deque()
        self._spans: deque[SpanBlock] = deque()
        self._samples: deque[Sample] = deque()
        self._blocks: deque[SampleBlock] = deque()
        self._values = 0

    def put_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.append(event)
            if isinstance(event, URGENT):
                self.urgent.set()

    def put_hello(self, hello: AgentHello, *, first: bool) -> None:
        """The first one of a boot goes before whatever came while it was made ready."""
        if first:
            self._events.appendleft(hello)
            self.urgent.set()
        else:
            self.put_events([hello])

    def put_spans(self, blocks: Iterable[SpanBlock]) -> None:
        self._spans.extend(blocks)

    def put_samples(self, samples: Iterable[Sample | SeriesBlock]) -> None:
        """A value that is not finite is left out: the server would refuse the whole batch."""
        for one in samples:
            if isinstance(one, SeriesBlock):
                self._blocks.append(one.packed)
                self._values += one.packed.count
            elif math.isfinite(one.value):
                self._samples.append(one)
                self._values += 1
        if self._values >= SAMPLES_PER_BATCH:  # as in a burst: rather soon than large
            self.urgent.set()

    def take(self) -> Iterator[News]:
        """Everything, cut into pieces that each fit a batch."""
        self.urgent.clear()
        self._values = 0
        while self._events or self._spans or self._samples or self._blocks:
            yield News(_first_events(self._events), self._first_spans(), *self._first_samples())

    def _first_spans(self) -> list[SpanBlock]:
        spans: list[SpanBlock] = []
        room = SPAN_BYTES_PER_BATCH
        while self._spans and (not spans or len(self._spans[0].columns) <= room):
            spans.append(self._spans.popleft())
            room -= len(spans[-1].columns)
        return spans

    def _first_samples(self) -> tuple[list[Sample], list[SampleBlock]]:
        room = min(SAMPLES_PER_BATCH, len(self._samples))
        samples = [self._samples.popleft() for _ in range(room)]
        blocks: list[SampleBlock] = []
        room = SAMPLES_PER_BATCH - room
        while self._blocks and room > 0:
            blocks.append(self._blocks.popleft())
            room -= blocks[-1].count
        return samples, blocks


def _first_events(queue: deque[Event]) -> list[Event]:
    """No more than one dump, which is large."""
    events: list[Event] = []
    while queue and len(events) < EVENTS_PER_BATCH:
        events.append(queue.popleft())
        if isinstance(events[-1], RankDump):
            break
    return events
