"""The CPU time that the hooks add to a training step of 20 ms or more, in paired steps.

The host of the step waits for its accelerator (sleeps) for 22 ms, as a training host does: three
sections, 12 gradient all-reduces, the boundary, the wait for data, the poll and the report of a
loss. Then the same time as a pipelined step of 8 microbatches: 16 actions of two sections each and
12 all-reduces, 60 timed calls, more than the goal assumes; a DistributedDataParallel model with 12
buckets; and a step that computes on the host, a few thousand short torch operations. Steps with and
without the hooks alternate, and so does their order in a pair, because the speed of a shared
machine changes within tenths of a second. Without the hooks, torch is unmodified, and the loop
calls empty context managers. The result is the median over pairs of the additional CPU time of the
training thread, as a share of the step's wall time, with its standard error. Within two errors of
the goal, the goal is neither met nor missed.

The reader of the ring is a process that reads, packs and stores as an agent does; once it has read,
it is stopped, killed, or its disk is full (/dev/full). The first row compares the step with itself
and shows the noise; the last one has torch.profiler around every step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks.harness import Result
from benchmarks.harness.recorded import check_recorded
from benchmarks.harness.torch_alone import torch_alone
from paceline import Op

PAIRS = 500
COLLECTIVE_PAIRS = 1000  # more pairs, because threads of gloo add the most variance to these steps
PROFILED_PAIRS = 25
WARM_PAIRS = 10
MICROBATCHES = 8
LAYERS = 32
WIDTH = 64
WAITING_SECONDS = 0.022
GOAL_PERCENT = 0.5
START_SECONDS = 60.0  # until the agent reads

AGENT = """
import pathlib, sys, time
from paceline_wire.batch import Batch, SpanBlock, encode
from paceline_wire.ring import RingError, RingReader
from paceline_wire.spans import to_columns
directory, spool = pathlib.Path(sys.argv[1]), open(sys.argv[2], "wb", buffering=0)
reader, made, has_read = None, None, False
while True:
    time.sleep(0.1)
    try:
        ring = next(directory.glob("*.ring"))
        if ring.stat().st_ino != made:
            reader, made = RingReader(ring), ring.stat().st_ino
        block = SpanBlock("bench", 0, 0, to_columns(reader.read()), 0)
        reader.view()
        batch = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, spans=[block])
        if block.count and not has_read:
            has_read = True
            print(flush=True)
        spool.write(encode(batch))
    except (RingError, OSError, StopIteration):
        pass
"""

Condition = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Calls:
    """The functions of the hooks that the loop calls, or empty ones in their place."""

    section: Callable[[str], AbstractContextManager[None]]
    pipelining: Callable[..., AbstractContextManager[None]]
    optimizer: Callable[[], AbstractContextManager[None]]
    report: Callable[..., None]
    pending: Callable[[], Any]
    all_reduce: Callable[..., Any]


NOTHING = nullcontext()
PLAIN = Calls(
    section=lambda name: NOTHING,
    pipelining=lambda op, microbatch: NOTHING,
    optimizer=lambda: NOTHING,
    report=lambda loss: None,
    pending=lambda: None,
    all_reduce=dist.all_reduce,
)
TWO_LINES = replace(PLAIN)  # a script that calls nothing but `init` and `steps`


def measure() -> Iterator[Result]:
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        os.environ["PACELINE_RING_DIRECTORY"] = directory
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        pairs = COLLECTIVE_PAIRS
        noise = _percent(WaitingStep(), pairs=pairs)
        yield from _results("none, the same step twice", noise, goal=None)
        together: list[float] = []
        for name, condition in CONDITIONS.items():
            with _hooks(directory) as hooked, condition(directory):
                percent = _percent(WaitingStep(), hooked, pairs=pairs)
            together += percent
            yield from _results(name, percent)
        yield from _results("these five together", together)
        with _hooks(directory) as hooked:
            yield from _results("no collectives", _percent(WaitingSectionsStep(), hooked))
            for name, calls in (("", TWO_LINES), (", all calls", hooked)):
                yield from _results(
                    f"DistributedDataParallel{name}",
                    _percent(ReducerStep(), calls, pairs=pairs),
                )
            yield from _results("60 calls", _percent(WaitingPipelinedStep(), hooked), goal=None)
            yield from _results("computing host", _percent(DataParallelStep(), hooked))
        profiled = _percent(
            DataParallelStep(),
            around=lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
            pairs=PROFILED_PAIRS,
        )
        yield from _results("torch.profiler, every step", profiled, goal=None)
        dist.destroy_process_group()


@contextlib.contextmanager
def _hooks(directory: str) -> Iterator[Calls]:
    paceline.init()
    try:
        yield Calls(
            paceline.section,
            paceline.pipelining,
            paceline.optimizer,
            paceline.report,
            paceline.pending,
            dist.all_reduce,
        )
        check_recorded(directory)
    finally:
        paceline.finish()


class Step(ABC):
    """One optimizer step, with the calls at its end."""

    def __init__(self) -> None:
        self.buckets = [torch.ones(WIDTH * WIDTH) for _ in range(12)]

    def run(self, calls: Calls) -> None:
        self.train(calls)
        with calls.optimizer():
            self.update()
        calls.report(loss=1.0)
        calls.pending()

    @abstractmethod
    def train(self, calls: Calls) -> None: ...

    @abstractmethod
    def update(self) -> None: ...


class ReducerStep(Step):
    """A DistributedDataParallel model of 12 layers, each with a bucket of its own."""

    WIDTH = 256

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in self.buckets]
        self.model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb=self.WIDTH**2 * 4 / 2**20
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(430, self.WIDTH)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, calls: Calls) -> None:
        self.model(self.batch).square().mean().backward()


class DataParallelStep(Step):
    """A step of MICROBATCHES through LAYERS small layers, computed on the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        halves = [
            [
                module
                for _ in range(LAYERS // 2)
                for module in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
            ]
            for _ in range(2)
        ]
        self.first, self.second = (nn.Sequential(*modules) for modules in halves)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4, foreach=True)
        self.batch = torch.randn(16, WIDTH)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, calls: Calls) -> None:
        for _ in range(MICROBATCHES - 1):
            self.second(self.first(self.batch)).square().mean().backward()
        with calls.section("forward"):
            loss = self.second(self.first(self.batch)).square().mean()
        with calls.section("backward"):
            loss.backward()
            for bucket in self.buckets:
                calls.all_reduce(bucket)
        with calls.section("clip"):
            nn.utils.clip_grad_norm_(self.parameters, 1.0)


class WaitingStep(Step):
    """The host waits for its accelerator; meanwhile other processes use the caches."""

    def update(self) -> None:
        """Update the parameters, also those of the accelerator."""

    def train(self, calls: Calls) -> None:
        with calls.section("forward"):
            time.sleep(WAITING_SECONDS / 3)
        with calls.section("backward"):
            for bucket in self.buckets:
                time.sleep(WAITING_SECONDS * 2 / 3 / len(self.buckets))
                calls.all_reduce(bucket)
        with calls.section("clip"):
            pass


class WaitingSectionsStep(WaitingStep):
    """A step without collectives: the two lines and three sections."""

    def train(self, calls: Calls) -> None:
        for name in ("forward", "backward", "clip"):
            with calls.section(name):
                time.sleep(WAITING_SECONDS / 3)


class WaitingPipelinedStep(WaitingStep):
    def train(self, calls: Calls) -> None:
        for action in range(2 * MICROBATCHES):
            op = Op.BACKWARD if action % 2 else Op.FORWARD
            with calls.pipelining(op, microbatch=action // 2):
                for _ in range(2):
                    with calls.section("layer"):
                        time.sleep(WAITING_SECONDS / 4 / MICROBATCHES)
                if action < len(self.buckets):
                    calls.all_reduce(self.buckets[action])


def _percent(
    step: Step,
    hooked: Calls = PLAIN,
    *,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    pairs: int = PAIRS,
) -> list[float]:
    """Return the share that the hooks added to the step, for each pair."""
    batches: Iterator[None] = itertools.repeat(None)
    ways = {
        True: (hooked, batches if hooked is PLAIN else iter(paceline.steps(batches)), around),
        False: (PLAIN, batches, nullcontext),
    }
    added, walls = [], []
    for pair in range(WARM_PAIRS + pairs):
        wall, cpu = {}, {}
        for watched in (True, False) if pair % 2 else (False, True):
            calls, boundaries, surrounding = ways[watched]
            with surrounding(), torch_alone() if calls is PLAIN else nullcontext():
                wall_ns, cpu_ns = perf_counter_ns(), thread_time_ns()
                next(boundaries)
                step.run(calls)
                cpu[watched] = thread_time_ns() - cpu_ns
                wall[watched] = perf_counter_ns() - wall_ns
        added.append(cpu[True] - cpu[False])
        walls.append(wall[False])
    wall_ns = median(walls)
    return [each / wall_ns * 100 for each in added[WARM_PAIRS:]]


def _results(
    name: str, percent: list[float], goal: float | None = GOAL_PERCENT
) -> Iterator[Result]:
    value = median(percent)
    # Standard error of a median, from the median absolute deviation (normal errors assumed).
    spread = 1.4826 * median(abs(each - value) for each in percent)
    error = 1.2533 * spread / math.sqrt(len(percent))
    resolved = abs(value - GOAL_PERCENT) >= 2 * error
    yield Result(f"overhead: {name}", value, "%", goal=goal, resolved=resolved)
    yield Result(f"overhead: {name}, standard error", error, "%")


@contextlib.contextmanager
def _agent(directory: str, spool: str, then: signal.Signals | None) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, directory, spool], stdout=subprocess.PIPE
    )
    try:
        _await_reading(process)
        if then is not None:
            process.send_signal(then)
        yield
    finally:
        process.kill()
        process.wait()


def _await_reading(process: subprocess.Popen[bytes]) -> None:
    """Record sections until the agent has read one."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    while not select.select([process.stdout], [], [], 0.05)[0]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the agent has read nothing in {START_SECONDS:.0f} s")
        with paceline.section("start"):
            pass
    if not process.stdout.readline():
        raise RuntimeError("the agent has ended without reading")


@contextlib.contextmanager
def _no_agent(directory: str) -> Iterator[None]:
    with nullcontext():
        yield


CONDITIONS: dict[str, Condition] = {
    "nobody reads": _no_agent,
    "agent reads": lambda directory: _agent(directory, "/dev/null", None),
    "agent stopped": lambda directory: _agent(directory, "/dev/null", signal.SIGSTOP),
    "agent killed": lambda directory: _agent(directory, "/dev/null", signal.SIGKILL),
    "agent's disk full": lambda directory: _agent(directory, "/dev/full", None),
}
