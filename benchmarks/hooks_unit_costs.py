"""The cost of single calls of the hooks to the training thread.

For comparison: two clock reads alone, and the same section as a `contextlib.contextmanager`, as
most timing code is written. NVIDIA's resiliency extension takes 1.68 us per section.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import perf_counter_ns

import torch
import torch.distributed as dist

import paceline
from benchmarks.harness import Result, nanoseconds_each
from benchmarks.harness.recorded import check_recorded
from benchmarks.harness.torch_alone import torch_alone
from paceline import Op


def measure() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        os.environ["PACELINE_RING_DIRECTORY"] = directory
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        paceline.init()
        for _ in paceline.steps([0]):
            yield from _sections()
            yield from _cold_sections()
        yield from _boundary()
        yield from _collective()
        check_recorded(directory)
        paceline.finish()
        dist.destroy_process_group()


def _sections() -> Iterator[Result]:
    durations = []

    def raw(count: int) -> None:
        for _ in range(count):
            started = perf_counter_ns()
            _ = perf_counter_ns() - started

    @contextlib.contextmanager
    def generator(name: str) -> Iterator[None]:
        started = perf_counter_ns()
        yield
        durations.append((name, perf_counter_ns() - started))

    def generators(count: int) -> None:
        durations.clear()
        for _ in range(count):
            with generator("x"):
                pass

    def sections(count: int) -> None:
        for _ in range(count):
            with paceline.section("x"):
                pass

    def actions(count: int) -> None:
        for _ in range(count):
            with paceline.pipelining(Op.FORWARD, microbatch=3):
                pass

    def polls(count: int) -> None:
        for _ in range(count):
            paceline.pending()

    cost = nanoseconds_each(
        {
            "raw": raw,
            "generator": generators,
            "section": sections,
            "action": actions,
            "poll": polls,
        }
    )
    yield Result("section: two clock reads alone", cost["raw"], "ns")
    yield Result("section: contextlib, to a list", cost["generator"], "ns", cost["raw"])
    yield Result("section: paceline", cost["section"], "ns", cost["generator"], goal=1000)
    yield Result("pipeline action: paceline", cost["action"], "ns", cost["generator"])
    yield Result("control poll", cost["poll"], "ns", goal=1000)


class _ClockReads:
    """Two clock reads: the minimum of a section."""

    __slots__ = ("duration_ns", "started_ns")

    def __enter__(self) -> None:
        self.started_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.duration_ns = perf_counter_ns() - self.started_ns


def _cold_sections() -> Iterator[Result]:
    """Measure sections with cold CPU caches, as between kernels."""
    matrix, target = torch.randn(192, 192) / 14, torch.empty(192, 192)
    torch.set_num_threads(1)

    def around(made: Callable[[], AbstractContextManager[object]]) -> Callable[[int], None]:
        def run(count: int) -> None:
            for _ in range(count):
                with made():
                    torch.mm(matrix, matrix, out=target)
                    torch.mm(matrix, target, out=target)

        return run

    clock = _ClockReads()
    cost = nanoseconds_each(
        {
            "plain": around(contextlib.nullcontext),
            "clock": around(lambda: clock),
            "section": around(lambda: paceline.section("x")),
            "record_function": around(lambda: torch.profiler.record_function("x")),
        },
        count=32,
        repeats=200,
    )
    plain = cost["plain"]
    yield Result("cold section: two clock reads alone", cost["clock"] - plain, "ns")
    yield Result("cold section: idle record_function", cost["record_function"] - plain, "ns")
    yield Result("cold section: paceline", cost["section"] - plain, "ns")


def _boundary() -> Iterator[Result]:
    def plain(count: int) -> None:
        for _ in iter(range(count)):
            pass

    def steps(count: int) -> None:
        for _ in paceline.steps(range(count)):
            pass

    cost = nanoseconds_each({"plain": plain, "steps": steps}, count=5000)
    yield Result("step boundary with data wait", cost["steps"] - cost["plain"], "ns", goal=20_000)


def _collective() -> Iterator[Result]:
    """Compare with torch without the hooks, in a group of one rank."""
    tensor = torch.ones(8)

    def timed(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(tensor)

    def untimed(count: int) -> None:
        with torch_alone():
            timed(count)

    def waited(count: int) -> None:
        for _ in range(count):
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()

    def unwaited(count: int) -> None:
        with torch_alone():
            waited(count)

    cost = nanoseconds_each(
        {"timed": timed, "untimed": untimed, "waited": waited, "unwaited": unwaited},
        count=4000,
        repeats=15,
    )
    yield Result("collective: added to a blocking one", cost["timed"] - cost["untimed"], "ns")
    yield Result("collective: added to an async one", cost["waited"] - cost["unwaited"], "ns")
