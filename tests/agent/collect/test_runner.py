"""The runner with collectors that fail in every way that real ones do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.blocks import each
from paceline_agent.collect.collectors import discover
from paceline_agent.collect.collectors.nvml import NvmlCollector
from paceline_agent.collect.contract import Collected, Collector, CollectorUnavailable, Context
from paceline_agent.collect.runner import Patience, Runner
from paceline_demo.fake_nvml import CompilerMissing, FakeGpus, build, environment
from paceline_wire.batch import CollectorEvent, GpuInfo, Sample

IMPATIENT = Patience(hung_seconds=0.2, retry_seconds=0.05, retry_maximum_seconds=0.1)


class Steady(Collector):
    name: ClassVar[str] = "steady"
    interval_seconds: ClassVar[float] = 0.01

    def collect(self, now_ns: int) -> Collected:
        return Collected(samples=[Sample("steady", {}, 1.0, now_ns)])


class Log:
    """Results that the runner emitted; tests wait for them."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.events: list[tuple[str, str]] = []

    def __call__(self, collected: Collected) -> None:
        self.samples += each(collected.samples)
        for event in collected.events:
            if isinstance(event, CollectorEvent):
                self.events.append((event.collector, event.kind))

    def count(self, name: str) -> int:
        return sum(sample.name == name for sample in self.samples)

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"in vain; events so far: {self.events}"
            await asyncio.sleep(0.01)


def pool_threads() -> int:
    return sum(thread.name == "collectors" for thread in threading.enumerate())


@asynccontextmanager
async def running(
    *collectors: type[Collector], context: Context, emit: Any = None, patience: Patience = IMPATIENT
) -> Any:
    log = Log()
    runner = Runner(collectors, context, patience=patience)
    task = asyncio.create_task(runner.run(emit or log))
    try:
        yield log
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(node_directory=tmp_path)


def test_a_collector_joins_by_being_in_the_folder():
    names = [collector.name for collector in discover()]
    assert names == sorted(names)
    assert {"host", "nic", "numa", "nvml", "rdma"} <= set(names)
    for collector in discover():
        assert collector.deadline_seconds <= 4, "a hang must be reported within 5 s"


async def test_each_call_is_timed(context):
    async with running(Steady, context=context) as log:
        await log.until(lambda: log.count("steady") > 2)
    success = next(s for s in log.samples if s.name == "paceline_collector_success")
    assert (success.labels, success.value) == ({"collector": "steady"}, 1.0)
    assert log.count("paceline_collector_duration_seconds") > 2
    assert log.events == []


async def test_a_collector_that_brings_too_much_is_cut_and_it_shows(context):
    class Flooding(Steady):
        name: ClassVar[str] = "flooding"
        series_at_most: ClassVar[int] = 3

        def collect(self, now_ns: int) -> Collected:
            samples = [Sample("flood", {"n": str(n)}, 1.0, now_ns) for n in range(5)]
            return Collected(samples=samples, lasting=[Sample("kept", {}, 1.0, now_ns)])

    async with running(Flooding, context=context) as log:
        await log.until(lambda: log.count("flood") >= 6)
    last = {sample.name: sample.value for sample in log.samples[:7]}
    assert log.count("kept") == 0
    assert last["paceline_series"] == 3
    assert last["paceline_series_refused_total"] == 3


async def test_an_exception_costs_one_event_and_nobody_else(context):
    class Broken(Steady):
        name: ClassVar[str] = "broken"
        fails: ClassVar[bool] = True

        def collect(self, now_ns: int) -> Collected:
            if self.fails:
                raise KeyError("surprise")
            return Collected()

    async with running(Broken, Steady, context=context) as log:
        await log.until(lambda: log.count("steady") > 5 and len(log.events) > 0)
        Broken.fails = False
        await log.until(lambda: len(log.events) > 1)
    assert log.events == [("broken", "unavailable"), ("broken", "recovered")]


async def test_a_constructor_that_raises_is_tried_again(context):
    class Late(Steady):
        name: ClassVar[str] = "late"
        attempts: ClassVar[list[int]] = []

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.attempts.append(1)
            if len(self.attempts) < 3:
                raise CollectorUnavailable("not yet")

    async with running(Late, context=context) as log:
        await log.until(lambda: log.count("steady") > 0)
    assert log.events == [("late", "unavailable"), ("late", "recovered")]


async def test_a_thread_that_hangs_is_quarantined_and_never_piled_up(context):
    release = threading.Event()
    calls: list[int] = []

    class Stuck(Steady):
        name: ClassVar[str] = "stuck"
        deadline_seconds: ClassVar[float] = 0.1

        def collect(self, now_ns: int) -> Collected:
            calls.append(now_ns)
            release.wait(30)
            return Collected(samples=[Sample("stale", {}, 1.0, now_ns)])

    async with running(Stuck, Steady, context=context) as log:
        await log.until(lambda: log.events == [("stuck", "quarantined")])
        before = log.count("steady")
        await log.until(lambda: log.count("steady") > before + 30)
        assert len(calls) == 1
        assert pool_threads() <= 2
        release.set()
        await log.until(lambda: len(log.events) > 1)
    assert log.events == [("stuck", "quarantined"), ("stuck", "recovered")]
    assert log.samples[0].time_ns > 0
    first = calls[0]
    assert not any(s.name == "stale" and s.time_ns == first for s in log.samples)


async def test_a_thread_that_runs_is_late_but_not_stuck(context):
    """Neither a busy thread nor one that waits for a CPU counts as stuck."""
    release = threading.Event()

    class Busy(Steady):
        name: ClassVar[str] = "busy"
        interval_seconds: ClassVar[float] = 60.0
        deadline_seconds: ClassVar[float] = 1.0

        def collect(self, now_ns: int) -> Collected:
            while not release.is_set():
                pass
            return Collected(samples=[Sample("busy", {}, 1.0, now_ns)])

    class Stuck(Busy):
        name: ClassVar[str] = "stuck"

        def collect(self, now_ns: int) -> Collected:
            release.wait(60)
            return Collected()

    async with running(Busy, Stuck, context=context) as log:
        await log.until(lambda: ("stuck", "quarantined") in log.events)
        await asyncio.sleep(0.5)
        release.set()
        await log.until(lambda: log.count("busy") == 1)
        await log.until(lambda: ("stuck", "recovered") in log.events)
    assert not any(collector == "busy" for collector, _ in log.events)


async def test_a_call_that_never_gets_a_cpu_is_unavailable_at_last(context):
    release = threading.Event()

    class Busy(Steady):
        name: ClassVar[str] = "busy"
        deadline_seconds: ClassVar[float] = 1.0

        def collect(self, now_ns: int) -> Collected:
            while not release.is_set():
                pass
            return Collected()

    patience = Patience(starved_seconds=0.5, retry_seconds=0.05, retry_maximum_seconds=0.1)
    async with running(Busy, context=context, patience=patience) as log:
        await log.until(lambda: log.events == [("busy", "unavailable")])
        release.set()
        await log.until(lambda: log.events[1:] == [("busy", "recovered")])


class Computing(Collector):
    """A collector that computes for a moment, in a worker process."""

    name: ClassVar[str] = "computing"
    interval_seconds: ClassVar[float] = 0.05
    deadline_seconds: ClassVar[float] = 0.5
    isolated: ClassVar[bool] = True

    def collect(self, now_ns: int) -> Collected:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        pid = float(os.getpid())
        return Collected(samples=[Sample("worker", {}, pid, now_ns)])


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes import the collectors of this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.mark.usefixtures("importable")
async def test_a_worker_on_a_starved_host_is_not_stuck(context):
    """The worker gets 1/300 of a CPU, because another process on it is always busy."""
    async with running(Computing, context=context) as log:
        await log.until(lambda: log.count("worker") > 0)
        worker = int(next(sample.value for sample in log.samples if sample.name == "worker"))
        allowed = os.sched_getaffinity(worker)
        cpu = min(allowed)
        hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            os.sched_setaffinity(hog.pid, {cpu})
            os.sched_setaffinity(worker, {cpu})
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
            await asyncio.sleep(4.0)  # eight deadlines
            late = log.count("worker")
        finally:
            hog.kill()
            hog.wait()
        os.sched_setaffinity(worker, allowed)
        with suppress(PermissionError):  # an unprivileged user cannot leave SCHED_IDLE
            os.sched_setscheduler(worker, os.SCHED_OTHER, os.sched_param(0))
        await log.until(lambda: log.count("worker") > late)
    assert log.events == []


class Sleeping(Computing):
    """Takes four fifths of its deadline from the start of the call, without running."""

    name: ClassVar[str] = "sleeping"

    def collect(self, now_ns: int) -> Collected:
        time.sleep(max(0.0, 0.4 - (timeline_ns() - now_ns) / 1e9))
        return Collected(samples=[Sample("worker", {}, 1.0, now_ns)])


@pytest.mark.usefixtures("importable")
async def test_an_answer_that_the_agent_reads_late_was_not_late(context):
    """The agent itself gets no CPU while the worker answers, within its deadline."""
    async with running(Sleeping, context=context) as log:
        for _ in range(3):
            before = log.count("worker")
            await log.until(lambda before=before: log.count("worker") > before)
            await asyncio.sleep(0.35)  # the next call is being watched
            time.sleep(1.0)
    assert log.events == []


async def test_those_behind_a_call_that_hangs_lose_no_sweep(context):
    """All of them share a thread until one of them blocks it."""
    release = threading.Event()
    calls: list[str] = []

    class Stuck(Steady):
        name: ClassVar[str] = "stuck"
        interval_seconds: ClassVar[float] = 60.0

        def collect(self, now_ns: int) -> Collected:
            calls.append(self.name)
            release.wait(60)
            return Collected()

    class Behind(Stuck):
        name: ClassVar[str] = "behind"

        def collect(self, now_ns: int) -> Collected:
            calls.append(self.name)
            return Collected(samples=[Sample("behind", {}, 1.0, now_ns)])

    class AlsoStuck(Stuck):
        name: ClassVar[str] = "also stuck"

    collectors = (Steady, Stuck, AlsoStuck, Behind)
    async with running(*collectors, context=context) as log:
        await log.until(lambda: log.count("behind") == 1)
        assert sorted(calls) == ["also stuck", "behind", "stuck"]
        assert log.events == [], "nobody was late"
        release.set()
        await log.until(lambda: log.count("paceline_collector_success") > 50)
        await log.until(lambda: pool_threads() <= 1)


async def test_what_emit_refuses_is_counted_and_collecting_goes_on(context):
    log = Log()

    def emit(collected: Collected) -> None:
        if not log.samples:
            log.samples.append(Sample("refused", {}, 1.0, 0))
            raise OSError(28, "No space left on device")
        log(collected)

    async with running(Steady, context=context, emit=emit):
        await log.until(lambda: log.count("steady") > 2)
    assert any(s.name == "paceline_collector_not_taken_total" and s.value == 1 for s in log.samples)


async def test_the_inventory_follows_what_is_collected(context):
    gpu = GpuInfo(index=0, uuid="GPU-a", name="NVIDIA H200", pci_bus_id="00000000:1A:00.0")

    class Finder(Steady):
        name: ClassVar[str] = "finder"

        def collect(self, now_ns: int) -> Collected:
            return Collected(gpus=[gpu])

    async with running(Finder, context=context) as log:
        await log.until(lambda: context.inventory.gpus == (gpu,))


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """One emulated GPU, watched with short timeouts."""
    try:
        library = build(tmp_path / "cache")
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    gpus = FakeGpus.create(tmp_path / "gpus", 1)
    for name, value in environment(library, gpus.path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(NvmlCollector, "deadline_seconds", 0.5)
    monkeypatch.setattr(NvmlCollector, "interval_seconds", 0.05)
    return gpus


async def test_a_driver_that_hangs_is_killed_retried_and_taken_back(context, gpus):
    """A real worker process is blocked in a real library call while another collector continues."""
    async with running(NvmlCollector, Steady, context=context) as log:
        await log.until(lambda: log.count("DCGM_FI_DEV_SM_CLOCK") > 0)
        before = len(log.events)
        gpus.set(0, hang_seconds=3600)
        await log.until(lambda: ("nvml", "quarantined") in log.events[before:])
        steady = log.count("steady")
        # the worker was killed and hung again
        await log.until(lambda: log.count("steady") > steady + 50)
        assert log.events[before:] == [("nvml", "quarantined")]
        gpus.set(0, hang_seconds=0)
        await log.until(lambda: log.events[-1] == ("nvml", "recovered"))
        clocks = log.count("DCGM_FI_DEV_SM_CLOCK")
        await log.until(lambda: log.count("DCGM_FI_DEV_SM_CLOCK") > clocks)


async def test_a_driver_that_hangs_from_the_start_is_reported_as_soon(context, gpus):
    """The time limit of a worker's start does not apply to its first call."""
    gpus.set(0, hang_seconds=3600)
    patient_start = Patience(start_seconds=600, hung_seconds=0.2, retry_seconds=0.05)
    async with running(NvmlCollector, context=context, patience=patient_start) as log:
        await log.until(lambda: log.events == [("nvml", "quarantined")])


class FakeClock:
    """A clock that advances only by waiting for the next call."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def realtime_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic_seconds(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.Handle:
        def passed() -> None:
            self.now += seconds
            callback()

        self.pauses.append(seconds)
        return asyncio.get_running_loop().call_soon(passed)


async def test_a_burst_ends(context):
    class Rare(Steady):
        name: ClassVar[str] = "rare"
        interval_seconds: ClassVar[float] = 60.0

    clock = FakeClock()
    runner = Runner([Rare], context, clock=clock)
    task = asyncio.create_task(runner.run(lambda _: None))
    while len(clock.pauses) < 2:
        await asyncio.sleep(0)
    assert runner.burst([], 2.0) is None
    begun = len(clock.pauses)
    while len(clock.pauses) < begun + 30:
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    hurried = [pause for pause in clock.pauses[begun:] if pause < 1]
    assert 18 <= len(hurried) <= 22
    assert clock.pauses[-1] == 60.0


async def test_the_last_to_come_of_a_tick_finds_all_others_at_rest(context):
    """A hanging collector is not waited for."""
    released = threading.Event()

    class Slow(Steady):
        name: ClassVar[str] = "slow"
        interval_seconds: ClassVar[float] = 60.0
        deadline_seconds: ClassVar[float] = 0.2

        def collect(self, now_ns: int) -> Collected:
            released.wait(60)
            return super().collect(now_ns)

    class Quick(Steady):
        name: ClassVar[str] = "quick"
        interval_seconds: ClassVar[float] = 60.0

    found: list[tuple[str, bool]] = []
    runner = Runner([Quick, Slow], context, patience=Patience())
    task = asyncio.create_task(
        runner.run(lambda came: found.append((came.collector, runner.is_idle)))
    )
    try:
        await Log().until(lambda: len(found) == 2)
        released.set()
        await Log().until(lambda: len(found) == 3)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert found == [("slow", False), ("quick", True), ("slow", True)]  # the first call is overdue
