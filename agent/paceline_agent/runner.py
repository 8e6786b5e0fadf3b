"""Runs collectors: times each, survives its exceptions, quarantines one that hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline_agent.clock import Clock, SystemClock
from paceline_agent.collectors.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
)
from paceline_agent.lanes import Lane, lane_of
from paceline_wire.batch import CollectorEvent, GpuInfo, Sample

logger = logging.getLogger(__name__)


BURST_INTERVAL_SECONDS = 0.1
BURST_SECONDS_AT_MOST = 30.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the runner waits for what, in seconds."""

    start_seconds: float = 30.0  # for a worker process to be up; not part of a call
    hung_seconds: float = 60.0  # for a call past its deadline, before its worker is killed
    retry_seconds: float = 5.0  # after a failure; doubled each time
    retry_maximum_seconds: float = 60.0


class Runner:
    """Each collector at its own pace, none able to hold up another.

    `collectors` are classes (see `collectors.discover`): the runner makes them where they run,
    in a thread of their own or, if isolated, in a child process. At most one call of a collector
    is ever under way.
    """

    def __init__(
        self,
        collectors: Sequence[type[Collector]],
        context: Context,
        *,
        clock: Clock | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._context = context
        self._clock = clock or SystemClock()
        self._patience = patience or Patience()
        self._collectors = collectors
        self._seats: list[_Seat] = []

    async def run(self, emit: Callable[[Collected], None]) -> None:
        """Collect until cancelled. `emit` is called in the event loop's thread."""
        self._seats = seats = [self._seat(collector, emit) for collector in self._collectors]
        try:
            async with asyncio.TaskGroup() as group:
                for seat in seats:
                    group.create_task(seat.run(), name=f"collector {seat.name}")
        finally:
            for seat in seats:
                await seat.lane.close()

    def burst(self, names: Sequence[str], seconds: float) -> str | None:
        """Let these collectors (none named: all) hurry for a while. None, or why not."""
        if not 0 < seconds <= BURST_SECONDS_AT_MOST:
            return f"a burst lasts up to {BURST_SECONDS_AT_MOST:g} s, not {seconds:g}"
        unknown = set(names) - {seat.name for seat in self._seats}
        if unknown:
            known = ", ".join(seat.name for seat in self._seats)
            return f"no collector is named {', '.join(sorted(unknown))}; there are {known}"
        for seat in self._seats:
            if not names or seat.name in names:
                seat.hurry(seconds)
        return None

    def _seat(self, collector: type[Collector], emit: Callable[[Collected], None]) -> _Seat:
        lane = lane_of(collector, self._context)
        return _Seat(collector, lane, self._context, self._clock, self._patience, emit)


class _Seat:
    """One collector's place in the runner: its lane, its pace and what it was last said to be."""

    def __init__(
        self,
        collector: type[Collector],
        lane: Lane,
        context: Context,
        clock: Clock,
        patience: Patience,
        emit: Callable[[Collected], None],
    ) -> None:
        self.name = collector.name
        self.lane = lane
        self._type = collector
        self._context = context
        self._clock = clock
        self._patience = patience
        self._emit = emit
        self._failures = 0  # in a row
        self._trouble: str | None = None  # kind of the event last sent, None: collecting
        self._not_taken = 0
        self._refused = 0
        self._lasting = 0  # series that need not be brought each time
        self._brought_gpus = False
        self._hurries_until = 0.0
        self._rest: asyncio.Future[None] | None = None

    async def run(self) -> None:
        while True:
            started = self._clock.monotonic_seconds()
            call = asyncio.ensure_future(self.lane.collect(self._clock.realtime_ns()))
            try:
                pause = await self._attend(call, started)
            finally:
                call.cancel()
            self._rest = asyncio.ensure_future(self._clock.sleep(pause))
            try:
                await asyncio.wait({self._rest})
            finally:
                self._rest.cancel()

    def hurry(self, seconds: float) -> None:
        """Collect at BURST_INTERVAL_SECONDS from now on; one in trouble keeps its pause."""
        self._hurries_until = self._clock.monotonic_seconds() + seconds
        if self._rest is not None and self._trouble is None:
            self._rest.cancel()

    async def _attend(self, call: asyncio.Future[Collected], started: float) -> float:
        """See one call through; returns the seconds until the next."""
        deadline = self._type.deadline_seconds
        await self._see_opened(call)
        await asyncio.wait({call}, timeout=deadline)
        late = not call.done()
        if late:
            self._report_trouble("quarantined", f"no answer within {deadline:g} s", started)
            await self._outwait(call)
        try:
            collected = call.result()
        except CollectorUnavailable as unavailable:
            none_left: list[GpuInfo] | None = [] if self._brought_gpus else None
            return self._retry("unavailable", str(unavailable), started, none_left)
        except Exception as error:
            if late:
                return self._retry("quarantined", str(error), started)
            logger.warning("collector %s failed", self.name, exc_info=error)
            return self._retry("unavailable", f"{type(error).__name__}: {error}", started)
        if late:  # what it read is of unknown age
            collected = Collected(
                events=collected.events, gpus=collected.gpus, gpu_of_pid=collected.gpu_of_pid
            )
        return self._report_success(collected, started)

    async def _see_opened(self, call: asyncio.Future[Collected]) -> None:
        """Let a worker process start: what that takes is not the collector's."""
        if self.lane.opened.is_set():
            return
        opened = asyncio.ensure_future(self.lane.opened.wait())
        either: set[asyncio.Future[Any]] = {call, opened}
        try:
            await asyncio.wait(
                either,
                timeout=self._patience.start_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            opened.cancel()

    async def _outwait(self, call: asyncio.Future[Collected]) -> None:
        await asyncio.wait({call}, timeout=self._patience.hung_seconds)
        if not call.done():
            self.lane.abandon()
            await asyncio.wait({call})  # let be what cannot be killed: never a second one

    def _retry(
        self, kind: str, detail: str, started: float, gpus: list[GpuInfo] | None = None
    ) -> float:
        self._report_trouble(kind, detail, started, gpus)
        pause = self._patience.retry_seconds * 2.0**self._failures
        self._failures = min(self._failures + 1, 30)
        return min(pause, self._patience.retry_maximum_seconds)

    def _report_trouble(
        self, kind: str, detail: str, started: float, gpus: list[GpuInfo] | None = None
    ) -> None:
        events = []
        if self._trouble != kind:
            logger.info("collector %s is %s: %s", self.name, kind, detail)
            events.append(self._event(kind, detail))
        self._trouble = kind
        self._lasting = 0
        health = self._health(started)
        self._deliver(Collected(samples=health, lasting=[], events=[*events], gpus=gpus))

    def _report_success(self, collected: Collected, started: float) -> float:
        events = list(collected.events)
        if self._trouble is not None:
            logger.info("collector %s is collecting again", self.name)
            events.append(self._event("recovered", f"was {self._trouble}"))
        self._trouble = None
        self._failures = 0
        if collected.gpus is not None:
            self._brought_gpus = True
            self._context.inventory.gpus = tuple(collected.gpus)
        if collected.gpu_of_pid is not None:
            self._context.inventory.gpu_of_pid = collected.gpu_of_pid
        collected, refused = bounded(self._type, collected)
        self._refused += refused
        if collected.lasting is not None:
            self._lasting = len(collected.lasting)
        brought = len(collected.samples) + self._lasting
        samples = collected.samples + self._health(started, brought=brought)
        self._deliver(msgspec.structs.replace(collected, samples=samples, events=events))
        now = self._clock.monotonic_seconds()
        interval = self._type.interval_seconds
        if now < self._hurries_until:
            interval = min(interval, BURST_INTERVAL_SECONDS)
        return max(0.0, interval - (now - started))

    def _deliver(self, collected: Collected) -> None:
        try:
            self._emit(msgspec.structs.replace(collected, collector=self.name))
        except Exception:
            self._not_taken += 1
            logger.exception("what collector %s brought was not taken", self.name)

    def _event(self, kind: str, detail: str) -> CollectorEvent:
        return CollectorEvent(
            time_ns=self._clock.realtime_ns(), collector=self.name, kind=kind, detail=detail
        )

    def _health(self, started: float, *, brought: int | None = None) -> list[Sample]:
        now_ns = self._clock.realtime_ns()
        duration = self._clock.monotonic_seconds() - started
        not_taken = Sample(
            "paceline_collector_not_taken_total", {"collector": self.name}, self._not_taken, now_ns
        )
        return [*health(self.name, duration, now_ns, brought, self._refused), not_taken]


def bounded(collector: type[Collector], collected: Collected) -> tuple[Collected, int]:
    """What a collector may bring in one call, and how many values were left out."""
    samples, lasting = collected.samples, collected.lasting or []
    beyond = len(samples) + len(lasting) - collector.series_at_most
    if beyond <= 0:
        return collected, 0
    kept = (samples + lasting)[: collector.series_at_most]
    return msgspec.structs.replace(collected, samples=kept, lasting=[]), beyond


def health(
    name: str, duration_seconds: float, now_ns: int, brought: int | None, refused: int
) -> list[Sample]:
    """How a call of a collector went; `brought` is None if it failed."""
    labels = {"collector": name}
    return [
        Sample("paceline_collector_success", labels, float(brought is not None), now_ns),
        Sample("paceline_collector_duration_seconds", labels, duration_seconds, now_ns),
        Sample("paceline_series", labels, float(brought or 0), now_ns),
        Sample("paceline_series_refused_total", labels, float(refused), now_ns),
    ]
