"""Runs collectors: measures each call, survives its exceptions, quarantines one that hangs."""

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
from paceline_agent.collect.pool import CollectorLane, CollectorPool, lane_of
from paceline_agent.collect.scheduling import Runnable, is_stuck, watched_seconds
from paceline_wire.batch import CollectorEvent, GpuInfo

logger = logging.getLogger(__name__)


BURST_INTERVAL_SECONDS = 0.1
BURST_SECONDS_AT_MOST = 30.0
BUSY = "it is busy, or the host short of CPU"

_HEALTH = (
    "paceline_collector_success",
    "paceline_collector_duration_seconds",
    "paceline_series",
    "paceline_series_refused_total",
    "paceline_collector_not_taken_total",
)


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and pauses of the runner, in seconds."""

    start_seconds: float = 30.0  # until a worker process has started; not part of a call
    starved_seconds: float = 30.0  # until a call that runs or waits for a CPU is late
    hung_seconds: float = 60.0  # from a call being late until its worker is killed
    retry_seconds: float = 5.0  # after a failure; doubled each time
    retry_maximum_seconds: float = 60.0


class Runner:
    """Runs each collector at its own interval; none can delay another.

    `collectors` are classes (see `collectors.discover`). The runner creates each where it runs: in
    a thread shared by all that do not hang or, if isolated, in a child process. At most one call of
    a collector is in progress.
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
        self._scheduled: list[_ScheduledCollector] = []

    async def run(self, emit: Callable[[Collected], None]) -> None:
        """Collect until cancelled. `emit` is called in the event loop's thread."""
        pool = CollectorPool()
        self._scheduled = [
            _ScheduledCollector(
                collector,
                lane_of(collector, self._context, pool),
                self._context,
                self._clock,
                self._patience,
                emit,
            )
            for collector in self._collectors
        ]
        try:
            for entry in self._scheduled:
                entry.start_call()
            await asyncio.get_running_loop().create_future()
        finally:
            for entry in self._scheduled:
                entry.stop()
            for entry in self._scheduled:
                await entry.lane.close()
            pool.close()

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress, apart from those that hang."""
        return all(entry.is_idle for entry in self._scheduled)

    def burst(self, names: Sequence[str], seconds: float) -> str | None:
        """Collect more often for a while; no names mean all. Returns an error, or None."""
        if not 0 < seconds <= BURST_SECONDS_AT_MOST:
            return f"a burst lasts up to {BURST_SECONDS_AT_MOST:g} s, not {seconds:g}"
        unknown = set(names) - {entry.name for entry in self._scheduled}
        if unknown:
            known = ", ".join(entry.name for entry in self._scheduled)
            return f"no collector is named {', '.join(sorted(unknown))}; there are {known}"
        for entry in self._scheduled:
            if not names or entry.name in names:
                entry.speed_up(seconds)
        return None


class _ScheduledCollector:
    """One collector with its lane, its schedule and its last reported state."""

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
        self._failures = 0  # consecutive failures
        self._trouble: str | None = None  # kind of the event last sent; None: collecting normally
        self._not_processed = 0
        self._refused = 0
        self._lasting = 0  # number of series that rarely change
        self._returned_gpus = False
        self._health_series = health_series(self.name)
        self._fast_until = 0.0
        self._started = 0.0
        self._late = False  # whether the current call is past its deadline
        self._call: asyncio.Future[Collected] | None = None  # None: idle
        self._opening: asyncio.Task[None] | None = None
        self._next: asyncio.Handle | None = None  # the next call, deadline or abandonment

    @property
    def is_idle(self) -> bool:
        return self._call is None or self._late

    def start_call(self) -> None:
        """Start a call; each call schedules the next."""
        self._started = self._clock.monotonic_seconds()
        self._late = False
        self._call = asyncio.ensure_future(self.lane.collect(self._clock.realtime_ns()))
        self._call.add_done_callback(self._on_result)
        if self.lane.opened.is_set():
            self._start_deadline()
        else:
            self._opening = asyncio.get_running_loop().create_task(self._wait_until_opened())

    def stop(self) -> None:
        self._cancel_timers()
        if self._call is not None:
            self._call.remove_done_callback(self._on_result)
            self._call.cancel()

    def speed_up(self, seconds: float) -> None:
        """Collect at BURST_INTERVAL_SECONDS; a failing collector keeps its pause."""
        self._fast_until = self._clock.monotonic_seconds() + seconds
        if self._call is None and self._trouble is None:
            self._cancel_timers()
            self.start_call()

    def _cancel_timers(self) -> None:
        for expected in (self._next, self._opening):
            if expected is not None:
                expected.cancel()
        self._next = self._opening = None

    async def _wait_until_opened(self) -> None:
        """Wait for a worker process; its start does not count as part of the call."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience.start_seconds):
                await self.lane.opened.wait()
        self._start_deadline()

    def _start_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        watched = watched_seconds(self._type.deadline_seconds)
        delay = self._type.deadline_seconds - watched
        self._next = loop.call_later(delay, self._watch, loop.time(), watched)

    def _watch(self, began: float, seconds: float) -> None:
        """Watch whether the call is stuck or only waits for a CPU, and judge it after `seconds`."""
        loop = asyncio.get_running_loop()
        runnable = self.lane.runnable()
        self._next = loop.call_later(seconds, self._judge, began, seconds, loop.time(), runnable)

    def _judge(
        self, began: float, seconds: float, watched_since: float, before: Runnable | None
    ) -> None:
        now = asyncio.get_running_loop().time()
        elapsed = now - watched_since
        if is_stuck(before, self.lane.runnable(), elapsed, seconds):
            deadline = self._type.deadline_seconds
            self._give_up("quarantined", f"no answer within {deadline:g} s")
        elif now - began < self._patience.starved_seconds:
            self._watch(began, seconds)
        else:
            self._give_up("unavailable", f"no answer within {now - began:.0f} s: {BUSY}")

    def _give_up(self, kind: str, detail: str) -> None:
        """Report the call as late; it may still return."""
        self._late = True
        self._report_trouble(kind, detail)
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._patience.hung_seconds, self.lane.abandon)

    def _on_result(self, call: asyncio.Future[Collected]) -> None:
        self._cancel_timers()
        self._call = None
        self._next = self._clock.call_later(self._report(call), self.start_call)

    def _report(self, call: asyncio.Future[Collected]) -> float:
        """Report the result of a call; returns the seconds until the next call."""
        try:
            collected = call.result()
            if self._late:  # the age of the samples is unknown
                collected = Collected(
                    events=collected.events, gpus=collected.gpus, gpu_of_pid=collected.gpu_of_pid
                )
            return self._report_success(collected)
        except CollectorUnavailable as unavailable:
            no_gpus: list[GpuInfo] | None = [] if self._returned_gpus else None
            return self._retry("unavailable", str(unavailable), no_gpus)
        except Exception as error:
            if self._late:
                return self._retry(self._trouble or "quarantined", str(error))
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
            self._returned_gpus = True
            self._context.inventory.gpus = tuple(collected.gpus)
        if collected.gpu_of_pid is not None:
            self._context.inventory.gpu_of_pid = collected.gpu_of_pid
        collected, refused = bounded(self._type, collected)
        self._refused += refused
        if collected.lasting is not None:
            self._lasting = count(collected.lasting)
        returned = count(collected.samples) + self._lasting
        samples = [*collected.samples, self._health(returned=returned)]
        self._deliver(msgspec.structs.replace(collected, samples=samples, events=events))
        now = self._clock.monotonic_seconds()
        interval = self._type.interval_seconds
        if now < self._fast_until:
            interval = min(interval, BURST_INTERVAL_SECONDS)
        return max(0.0, interval - (now - self._started))

    def _deliver(self, collected: Collected) -> None:
        try:
            self._emit(msgspec.structs.replace(collected, collector=self.name))
        except Exception:
            self._not_processed += 1
            logger.exception("result of collector %s could not be processed", self.name)

    def _event(self, kind: str, detail: str) -> CollectorEvent:
        return CollectorEvent(
            time_ns=self._clock.realtime_ns(), collector=self.name, kind=kind, detail=detail
        )

    def _health(self, *, returned: int | None = None) -> SeriesBlock:
        now_ns = self._clock.realtime_ns()
        duration = self.lane.took_seconds
        if duration is None:
            duration = self._clock.monotonic_seconds() - self._started
        series, not_processed = self._health_series, self._not_processed
        return health(series, duration, now_ns, returned, self._refused, not_processed)


def bounded(collector: type[Collector], collected: Collected) -> tuple[Collected, int]:
    """Return the part of a result within `series_at_most`, and how many values were dropped."""
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
    returned: int | None,
    refused: int,
    not_processed: float = math.nan,
) -> SeriesBlock:
    """Return the health metrics of one call; `returned` is None where the call failed."""
    success = returned is not None
    values = (success, duration_seconds, returned or 0, refused, not_processed)
    return SeriesBlock(series, [*map(float, values)], now_ns)
