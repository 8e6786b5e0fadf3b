"""The outbox: events, spans and samples that wait for the next batch."""

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
    RankProfile,
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
    RankProfile,
    RankDump,
    CommandResult,
    DeviceEvent,
)
_OF_RANK = (RankStarted, RankAttached, RankDefined, RankState, RankAcknowledged, RankExited)
SPAN_BYTES_PER_BATCH = 4 << 20  # packed, well below what the server accepts
SAMPLES_PER_BATCH = 8_000  # three seconds of a large node, the longest period of a server
EVENTS_PER_BATCH = 2_000


def is_of_rank(event: Event) -> bool:
    """Return whether an event must stay in order with the rank's earlier events and spans."""
    return isinstance(event, _OF_RANK)


class BatchContents(NamedTuple):
    """The contents of one batch."""

    events: list[Event]
    spans: list[SpanBlock]
    samples: list[Sample]
    blocks: list[SampleBlock]


class Outbox:
    """Queues for the packer, in order of arrival; `urgent` is set if it should flush at once."""

    def __init__(self) -> None:
        self.urgent = asyncio.Event()
        self._events: deque[Event] = deque()
        self._spans: deque[SpanBlock] = deque()
        self._samples: deque[Sample] = deque()
        self._blocks: deque[SampleBlock] = deque()
        self._values = 0  # samples and values of blocks

    def put_events(self, events: Iterable[Event]) -> None:
        """Queue events."""
        for event in events:
            self._events.append(event)
            if isinstance(event, URGENT):
                self.urgent.set()

    def put_hello(self, hello: AgentHello, *, first: bool) -> None:
        """Queue a hello; the `first` one of a boot goes before everything queued so far."""
        if first:
            self._events.appendleft(hello)
            self.urgent.set()
        else:
            self.put_events([hello])

    def put_spans(self, blocks: Iterable[SpanBlock]) -> None:
        """Queue blocks of spans."""
        self._spans.extend(blocks)

    def put_samples(self, samples: Iterable[Sample | SeriesBlock]) -> None:
        """Queue samples without non-finite values, for which the server would refuse the batch."""
        for sample in samples:
            if isinstance(sample, SeriesBlock):
                self._blocks.append(sample.packed)
                self._values += sample.packed.count
            elif math.isfinite(sample.value):
                self._samples.append(sample)
                self._values += 1
        # in a burst, an early batch is better than a large one
        if self._values >= SAMPLES_PER_BATCH:
            self.urgent.set()

    def take(self) -> Iterator[BatchContents]:
        """Yield everything queued, in pieces that each fit a batch."""
        self.urgent.clear()
        self._values = 0
        while self._events or self._spans or self._samples or self._blocks:
            yield BatchContents(
                _first_events(self._events), self._first_spans(), *self._first_samples()
            )

    def _first_spans(self) -> list[SpanBlock]:
        spans: list[SpanBlock] = []
        free_bytes = SPAN_BYTES_PER_BATCH
        while self._spans and (not spans or len(self._spans[0].columns) <= free_bytes):
            spans.append(self._spans.popleft())
            free_bytes -= len(spans[-1].columns)
        return spans

    def _first_samples(self) -> tuple[list[Sample], list[SampleBlock]]:
        count = min(SAMPLES_PER_BATCH, len(self._samples))
        samples = [self._samples.popleft() for _ in range(count)]
        blocks: list[SampleBlock] = []
        free = SAMPLES_PER_BATCH - count
        while self._blocks and free > 0:
            blocks.append(self._blocks.popleft())
            free -= blocks[-1].count
        return samples, blocks


def _first_events(queue: deque[Event]) -> list[Event]:
    """Return the first events, with at most one dump, which is large."""
    events: list[Event] = []
    while queue and len(events) < EVENTS_PER_BATCH:
        events.append(queue.popleft())
        if isinstance(events[-1], RankDump):
            break
    return events
