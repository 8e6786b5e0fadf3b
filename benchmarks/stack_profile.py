"""Samples of the Python stacks of a rank: how much longer its steps take while they are taken.

A process computes steps of about a millisecond on one thread. Rounds with and without samples, as
the agent takes them, alternate, and each round counts the steps: of a process without others, and
of one with a loader worker, which is sampled too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from ctypes import c_ulonglong
from multiprocessing.sharedctypes import Synchronized
from statistics import median

import torch

from benchmarks.harness import Result
from paceline_agent.rings import stacks

ROUNDS = 6  # with samples, and as many without
SECONDS = 10.0
GOAL = 1.01


def train(steps: Synchronized[int], with_worker: bool) -> None:
    torch.set_num_threads(1)
    trainer = os.getpid()
    if with_worker and os.fork() == 0:
        while os.getppid() == trainer:
            time.sleep(0.5)
        os._exit(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    batch = torch.randn(64, 128)
    while True:
        model(batch).pow(2).mean().backward()
        steps.value += 1


def measure() -> Iterator[Result]:
    yield from _measure(with_worker=False)
    yield from _measure(with_worker=True)


def _measure(*, with_worker: bool) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    steps: Synchronized[int] = context.Value(c_ulonglong)
    trainer = context.Process(target=train, args=(steps, with_worker), daemon=True)
    trainer.start()
    assert trainer.pid is not None
    try:
        while steps.value < 1000:
            time.sleep(0.1)
        alone, sampled, samples = [], [], 0
        used = _cpu_seconds()
        for _ in range(ROUNDS):
            begun, before = time.perf_counter(), steps.value
            time.sleep(SECONDS)
            alone.append((steps.value - before) / (time.perf_counter() - begun))
            begun, before = time.perf_counter(), steps.value
            main, _ = asyncio.run(stacks.profile(trainer.pid, SECONDS, workers=with_worker))
            sampled.append((steps.value - before) / (time.perf_counter() - begun))
            samples += main.samples
        used = _cpu_seconds() - used
    finally:
        trainer.kill()
    slower = median(without / within for without, within in zip(alone, sampled, strict=True))
    of = "with a worker" if with_worker else "alone"
    goal = None if with_worker else GOAL
    yield Result(f"steps while stacks are sampled, {of}, time of one", slower, "x", goal=goal)
    yield Result(f"stack samples in 10 s, {of}", samples / ROUNDS, "samples")
    yield Result(f"CPU time of the sampler, {of}", used / ROUNDS / SECONDS, "CPUs")


def _cpu_seconds() -> float:
    """Return the CPU time of the children that have ended: each sampler."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime
