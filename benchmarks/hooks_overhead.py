"""What the hooks add to a training step of 20 ms and more, paired with the same loop without.

The host of the step waits for its accelerator (sleeps) for 22 ms, as a training host does: three
sections, 12 gradient all-reduces, the boundary, the wait for data, the poll and the report of a
loss. Then the same time as a pipelined step of 8 microbatches: 16 actions of two sections each and
12 all-reduces, 60 timed calls; and a step that computes on the host, a few thousand short torch
operations. Blocks of a few steps with the hooks and without take turns (`init` and `finish` between
them, so that without means untouched functions). A block counts by its median step; what is told is
the median over pairs of blocks of the CPU time which the training thread needed more, as a share
of the step's wall time, with its standard error. Where the error is more than half the goal, the
goal is neither met nor missed.

The agent's end of the ring is a process that reads, packs and stores as an agent does; then it is
stopped, killed, and its disk full (/dev/full). First the same loop against itself, which shows
what noise alone makes of it; last, torch.profiler over every step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter_ns, thread_time_ns

import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks.harness import Result
from paceline import Op

PAIRS = 50
WARM_STEPS = 2
STEPS = 6  # of a block, after those
MICROBATCHES = 8
LAYERS = 32
WIDTH = 64
WAITING_SECONDS = 0.022
GOAL_PERCENT = 0.5

AGENT = """
import pathlib, sys, time
from paceline_wire.batch import Batch, SpanBlock, encode
from paceline_wire.ring import RingError, RingReader
from paceline_wire.spans import to_columns
directory, spool = pathlib.Path(sys.argv[1]), open(sys.argv[2], "wb", buffering=0)
reader, made = None, None
while True:
    time.sleep(0.1)
    try:
        ring = next(directory.glob("*.ring"))
        if ring.stat().st_ino != made:
            reader, made = RingReader(ring), ring.stat().st_ino
        block = SpanBlock("bench", 0, 0, to_columns(reader.read()), 0)
        reader.view()
        batch = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, spans=[block])
        spool.write(encode(batch))
    except (RingError, OSError, StopIteration):
        pass
"""

Condition = Callable[[str], AbstractContextManager[None]]


def measure() -> Iterator[Result]:
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        os.environ["PACELINE_RING_DIRECTORY"] = directory
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield from _compare("none, the same loop twice", WaitingStep(), _run_block, goal=None)
        for name, condition in CONDITIONS.items():
            with condition(directory):
                yield from _compare(name, WaitingStep(), _hooked)
        yield from _compare("no collectives", WaitingSectionsStep(), _hooked)
        yield from _compare("60 calls", WaitingPipelinedStep(), _hooked)
        yield from _compare("computing host", DataParallelStep(), _hooked)
        yield from _compare("torch.profiler, every step", DataParallelStep(), _profiled, goal=None)
        dist.destroy_process_group()


class Step(ABC):
    """One optimizer step, with the calls that every loop makes at its end."""

    def __init__(self) -> None:
        self.buckets = [torch.ones(WIDTH * WIDTH) for _ in range(12)]

    def run(self) -> None:
        self.train()
        with paceline.optimizer():
            self.update()
        paceline.report(loss=1.0)
        paceline.pending()

    @abstractmethod
    def train(self) -> None: ...

    @abstractmethod
    def update(self) -> None: ...


class DataParallelStep(Step):
    """MICROBATCHES of a network of LAYERS small layers, computed on the host."""

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

    def train(self) -> None:
        for _ in range(MICROBATCHES - 1):
            self.second(self.first(self.batch)).square().mean().backward()
        with paceline.section("forward"):
            loss = self.second(self.first(self.batch)).square().mean()
        with paceline.section("backward"):
            loss.backward()
            for bucket in self.buckets:
                dist.all_reduce(bucket)
        with paceline.section("clip"):
            nn.utils.clip_grad_norm_(self.parameters, 1.0)


class WaitingStep(Step):
    """The host waits for its accelerator, which leaves the caches to others."""

    def update(self) -> None:
        """The accelerator's, too."""

    def train(self) -> None:
        with paceline.section("forward"):
            time.sleep(WAITING_SECONDS / 3)
        with paceline.section("backward"):
            for bucket in self.buckets:
                time.sleep(WAITING_SECONDS * 2 / 3 / len(self.buckets))
                dist.all_reduce(bucket)
        with paceline.section("clip"):
            pass


class WaitingSectionsStep(WaitingStep):
    """Without collectives: the two lines and three sections."""

    def train(self) -> None:
        for name in ("forward", "backward", "clip"):
            with paceline.section(name):
                time.sleep(WAITING_SECONDS / 3)


class WaitingPipelinedStep(WaitingStep):
    def train(self) -> None:
        for action in range(2 * MICROBATCHES):
            op = Op.BACKWARD if action % 2 else Op.FORWARD
            with paceline.pipelining(op, microbatch=action // 2):
                for _ in range(2):
                    with paceline.section("layer"):
                        time.sleep(WAITING_SECONDS / 4 / MICROBATCHES)
                if action < len(self.buckets):
                    dist.all_reduce(self.buckets[action])


def _run_block(step: Step) -> list[tuple[int, int]]:
    """(wall, CPU) nanoseconds of each step; the boundary belongs to the step it begins."""
    costs = []
    started = (perf_counter_ns(), thread_time_ns())
    for _ in paceline.steps(range(WARM_STEPS + STEPS)):
        step.run()
        ended = (perf_counter_ns(), thread_time_ns())
        costs.append((ended[0] - started[0], ended[1] - started[1]))
        started = ended
    return costs[WARM_STEPS:]


def _hooked(step: Step) -> list[tuple[int, int]]:
    paceline.init()
    try:
        return _run_block(step)
    finally:
        paceline.finish()


def _profiled(step: Step) -> list[tuple[int, int]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return _run_block(step)


def _compare(
    name: str,
    step: Step,
    watched: Callable[[Step], list[tuple[int, int]]],
    goal: float | None = GOAL_PERCENT,
) -> Iterator[Result]:
    percent: list[float] = []
    for pair in range(PAIRS):
        if pair % 2:
            costs, baseline = watched(step), _run_block(step)
        else:
            baseline = _run_block(step)
            costs = watched(step)
        wall_ns, cpu_ns = (median(cost[clock] for cost in baseline) for clock in (0, 1))
        added_ns = median(cost[1] for cost in costs) - cpu_ns
        percent.append(added_ns / wall_ns * 100)
    value = median(percent)
    # Of a median, from the median absolute deviation (normal errors assumed).
    spread = 1.4826 * median(abs(each - value) for each in percent)
    error = 1.2533 * spread / math.sqrt(len(percent))
    resolved = error <= GOAL_PERCENT / 2
    yield Result(f"overhead: {name}", value, "%", goal=goal, resolved=resolved)
    yield Result(f"overhead: {name}, standard error", error, "%")


@contextlib.contextmanager
def _agent(directory: str, spool: str, then: signal.Signals | None) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", AGENT, directory, spool])
    try:
        if then is not None:
            process.send_signal(then)
        yield
    finally:
        process.kill()
        process.wait()


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
