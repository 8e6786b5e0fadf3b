"""Runs collectors: times each, survives its exceptions, quarantines one that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline_agent.clock import Clock, SystemClock
from paceline_agent.collect.blocks import Series, SeriesBlock, count
from paceline_agent.collect.contract import Collected, Collector, CollectorUnavailable, Context
from paceline_agent.collect.pool import CollectorLane, Crew, lane_of
from paceline_wire.batch import CollectorEvent, GpuInfo

logger = logging.getLogger(__name__)


BURST_INTERVAL_SECONDS = 0.1
BURST_SECONDS_AT_MOST = 30.0

_HEALTH = (
    "paceline_collector_success",
    "paceline_collector_duration_seconds",
    "paceline_series",
    "paceline_series_refused_total",
    "paceline_collector_not_taken_total",
)


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
    in a thread that they share while none of them is stuck or, if isolated, in a child process. At
    most one call of a collector is ever under way.
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
        crew = Crew()
        self._seats = [
            _Seat(
                collector,
                lane_of(collector, self._context, crew),
                self._context,
                self._clock,
                self._patience,
                emit,
            )
            for collector in self._collectors
        ]
        try:
            for seat in self._seats:
                seat.begin()
            await asyncio.get_running_loop().create_future()
        finally:
            for seat in self._seats:
                seat.stop()
            for seat in self._seats:
                await seat.lane.close()
            crew.close()

    @property
    def is_resting(self) -> bool:
        """No call is under way, but for those that hang."""
        return all(seat.is_resting for seat in self._seats)

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


class _Seat:
    """One collector's place in the runner: its lane, its pace and what it was last said to be."""

    def __init__(
        self,
        collector: type[Collector],
        lane: CollectorLane,
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
        self._health_series = health_series(self.name)
        self._hurries_until = 0.0
        self._started = 0.0
        self._late = False  # the call under way is past its deadline
        self._call: asyncio.Future[Collected] | None = None  # None: it rests
        self._opening: asyncio.Task[None] | None = None
        self._next: asyncio.Handle | None = None  # what comes if nothing else does

    @property
    def is_resting(self) -> bool:
        return self._call is None or self._late

    def begin(self) -> None:
        """Make a call, and the next ones each in its time."""
        self._started = self._clock.monotonic_seconds()
        self._late = False
        self._call = asyncio.ensure_future(self.lane.collect(self._clock.realtime_ns()))
        self._call.add_done_callback(self._answered)
        if self.lane.opened.is_set():
            self._grant_deadline()
        else:
            self._opening = asyncio.get_running_loop().create_task(self._see_opened())

    def stop(self) -> None:
        self._expect_nothing()
        if self._call is not None:
            self._call.remove_done_callback(self._answered)
            self._call.cancel()

    def hurry(self, seconds: float) -> None:
        """Collect at BURST_INTERVAL_SECONDS from now on; one in trouble keeps its pause."""
        self._hurries_until = self._clock.monotonic_seconds() + seconds
        if self._call is None and self._trouble is None:
            self._expect_nothing()
            self.begin()

    def _expect_nothing(self) -> None:
        for expected in (self._next, self._opening):
            if expected is not None:
                expected.cancel()
        self._next = self._opening = None

    async def _see_opened(self) -> None:
        """Let a worker process start: what that takes is not the collector's."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience.start_seconds):
                await self.lane.opened.wait()
        self._grant_deadline()

    def _grant_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._type.deadline_seconds, self._overdue)

    def _overdue(self) -> None:
        """Let be what cannot be killed: never a second one."""
        self._late = True
        deadline = self._type.deadline_seconds
        self._report_trouble("quarantined", f"no answer within {deadline:g} s")
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._patience.hung_seconds, self.lane.abandon)

    def _answered(self, call: asyncio.Future[Collected]) -> None:
        self._expect_nothing()
        self._call = None
        self._next = self._clock.call_later(self._judge(call), self.begin)

    def _judge(self, call: asyncio.Future[Collected]) -> float:
        """Tell what came of a call; returns the seconds until the next."""
        try:
            collected = call.result()
            if self._late:  # what it read is of unknown age
                collected = Collected(
                    events=collected.events, gpus=collected.gpus, gpu_of_pid=collected.gpu_of_pid
                )
            return self._report_success(collected)
        except CollectorUnavailable as unavailable:
            none_left: list[GpuInfo] | None = [] if self._brought_gpus else None
            return self._retry("unavailable", str(unavailable), none_left)
        except Exception as error:
            if self._late:
                return self._retry("quarantined", str(error))
            logger.warning("collector %s failed", self.name, exc_info=error)
            return self._retry("unavailable", f"{type(error).__name__}: {error}")

    def _retry(self, kind: str, detail: str, gpus: list[GpuInfo] | None = None) -> float:
        self._report_trouble(kind, detail, gpus)
        pause = self._patience.retry_seconds * 2.0**self._failures
        self._failures = min(self._failures + 1, 30)
        return min(pause, self._patience.retry_maximum_seconds)

    def _report_trouble(self, kind: str, detail: str, gpus: list[GpuInfo] | None = None) -> None:
        events = []
        if self._trouble != kind:
            logger.info("collector %s is %s: %s", self.name, kind, detail)
            events.append(self._event(kind, detail))
        self._trouble = kind
        self._lasting = 0
        self._deliver(Collected(samples=[self._health()], lasting=[], events=[*events], gpus=gpus))

    def _report_success(self, collected: Collected) -> float:
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
            self._lasting = count(collected.lasting)
        brought = count(collected.samples) + self._lasting
        samples = [*collected.samples, self._health(brought=brought)]
        self._deliver(msgspec.structs.replace(collected, samples=samples, events=events))
        now = self._clock.monotonic_seconds()
        interval = self._type.interval_seconds
        if now < self._hurries_until:
            interval = min(interval, BURST_INTERVAL_SECONDS)
        return max(0.0, interval - (now - self._started))

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

    def _health(self, *, brought: int | None = None) -> SeriesBlock:
        now_ns = self._clock.realtime_ns()
        duration = self.lane.took_seconds
        if duration is None:
            duration = self._clock.monotonic_seconds() - self._started
        series, not_taken = self._health_series, self._not_taken
        return health(series, duration, now_ns, brought, self._refused, not_taken)


def bounded(collector: type[Collector], collected: Collected) -> tuple[Collected, int]:
    """What a collector may bring in one call, and how many values were left out."""
    beyond = count(collected.samples) + count(collected.lasting or ()) - collector.series_at_most
    if beyond <= 0:
        return collected, 0
    kept = collected.everything()[: collector.series_at_most]
    return msgspec.structs.replace(collected, samples=kept, lasting=[]), beyond


def health_series(collector: str) -> Series:
    return Series([(name, {"collector": collector}) for name in _HEALTH])


def health(
    series: Series,
    duration_seconds: float,
    now_ns: int,
    brought: int | None,
    refused: int,
    not_taken: float = math.nan,
) -> SeriesBlock:
    """How a call of a collector went; `brought` is None if it failed."""
    success = brought is not None
    values = (success, duration_seconds, brought or 0, refused, not_taken)
    return SeriesBlock(series, [*map(float, values)], now_ns)
