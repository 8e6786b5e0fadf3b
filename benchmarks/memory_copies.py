"""The time that copies in memory take from a training.

One process with a state of 205 MB (four layers and the two moments of AdamW), and one of 118 MB
with 300 parameters. The time for which a copy blocks the loop is compared with
`torch.distributed.checkpoint.save` of the same state to disk, in turn: once if the optimizer steps
at once, so that it waits for the whole copy, and once if the step computes for long enough before.
The overhead of a copy is what the two steps after it take longer than the next four: steps in which
the host waits, as for an accelerator, and in which a thread of it computes. It is divided by the
steps between copies as they are chosen by the default budget of 0.5%. Where there is a GPU, the
same with a state there of 1.5 GB.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import mean, median, stdev
from time import perf_counter
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import paceline
from benchmarks.harness import Result
from benchmarks.harness.torch_alone import torch_alone
from paceline.checkpoints.memory.schedule import CopyPlan

SHAPES = {  # number of square layers and their width: 2 parameters and 4 moments per layer
    "205 MB of 8 parameters": (4, 2068),
    "118 MB of 300 parameters": (150, 256),
}
LARGE = next(iter(SHAPES))
ON_GPU = {"1.5 GB of 60 parameters on a GPU": (30, 2048)}
SAVES = 9
STEP_SECONDS = 0.25  # beside the optimizer's
COPIES = 50
CYCLE = 6  # steps between the copies that are timed
AFFECTED = 2  # steps that a copy may take longer: it is made and hashed in them


def measure() -> Iterator[Result]:
    torch.set_num_threads(1)
    os.environ["PACELINE_RING_DIRECTORY"] = ""  # the hooks are inert
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        os.environ["PACELINE_MEMORY_DIRECTORY"] = memory
        for shape in SHAPES:
            yield from _blocking(Path(disk), shape, _wait)
        for name, step in (
            ("host waits", _wait),
            ("host computes", _computing(torch.randn(192, 192) / 14, 1000)),
        ):
            yield from _overhead(Path(disk), name, LARGE, step)
        if torch.cuda.is_available():
            matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
            step = _computing(matrix, 20)
            for shape in ON_GPU:
                yield from _blocking(Path(disk), shape, step)
                yield from _overhead(Path(disk), "GPU computes", shape, step)


def _training(
    directory: Path, shape: str
) -> tuple[nn.Module, torch.optim.Optimizer, paceline.Checkpoints]:
    torch.manual_seed(0)
    layers, width = (SHAPES | ON_GPU)[shape]
    device = "cuda" if shape in ON_GPU else "cpu"
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = paceline.Checkpoints(directory, every=0, memory=True, model=model, optimizer=optimizer)
    return model, optimizer, state


def _blocking(disk: Path, shape: str, step: Callable[[], None]) -> Iterator[Result]:
    model, optimizer, state = _training(disk / shape.replace(" ", "-"), shape)
    copies = state._copies
    assert copies is not None
    copied, deferred, saved = list[float](), list[float](), list[float]()
    numbers = count(1000)
    for number in paceline.steps(range(SAVES + 1), state=state):
        optimizer.step()
        while copies._is_writing:
            time.sleep(0.001)
        if number == 0:  # the files are created after the first step
            continue
        for computes, results in ((False, copied), (True, deferred)):
            started = perf_counter()
            if computes:
                step()
            _await_gpu()
            alone, started = perf_counter() - started, perf_counter()
            # Beside those of the schedule.
            assert copies._copy(next(numbers))
            if computes:
                step()
            copies._updates._finish()  # before the step of an optimizer
            _await_gpu()
            results.append(perf_counter() - started - alone)
            while copies._is_writing:  # the hash takes no time from the comparison
                time.sleep(0.001)
            optimizer.step()  # its tensors can be deferred again
        started = perf_counter()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with torch_alone():
            dcp.save(content, checkpoint_id=disk / "dcp", no_dist=True)
        saved.append(perf_counter() - started)
        shutil.rmtree(disk / "dcp")
    copies.close(remove=True)
    baseline = 1e3 * median(saved)
    yield Result(f"memory copy: dcp.save of {shape}", baseline, "ms")
    goal = 0.15 * baseline
    name = f"memory copy: {shape} block a step"
    yield Result(name, 1e3 * median(deferred), "ms", baseline, goal=goal)
    name = f"memory copy: {shape} block an optimizer that steps at once"
    yield Result(name, 1e3 * median(copied), "ms", baseline, goal=goal)


def _overhead(disk: Path, host: str, shape: str, step: Callable[[], None]) -> Iterator[Result]:
    """Compare the two steps after a copy with the four after them."""
    _, optimizer, state = _training(disk / host.replace(" ", "-"), shape)
    copies = state._copies
    assert copies is not None
    steps = iter(paceline.steps(range(1_000_000), state=state))
    while copies._schedule.plan is None:
        next(steps)
        step()
        optimizer.step()
        _await_gpu()
    every = copies._schedule.plan.every
    with mock.patch.object(copies._schedule, "poll"):  # it keeps the plan of this measurement
        copies._schedule.plan = CopyPlan(0, CYCLE, CYCLE)
        added, durations = list[float](), list[float]()
        for number in range((COPIES + 2) * CYCLE):
            started = perf_counter()
            next(steps)
            step()
            optimizer.step()
            _await_gpu()
            durations.append(perf_counter() - started)
            if state.step % CYCLE == CYCLE - 1 and number > 2 * CYCLE:
                others = durations[-CYCLE + AFFECTED :]
                affected = durations[-CYCLE : -CYCLE + AFFECTED]
                added.append(sum(affected) - AFFECTED * median(others))
    copies.close(remove=True)
    share = 100 / (every * median(durations))  # percent per second that a copy adds
    error = share * stdev(added) / len(added) ** 0.5
    yield Result(f"memory copy: steps between copies, {host}", every, "steps")
    yield Result(
        f"memory copy: added to a step, {host}",
        share * mean(added),
        "%",
        goal=0.5,
        resolved=error < 0.25,
    )
    yield Result(f"memory copy: standard error of that, {host}", error, "%")


def _wait() -> None:
    time.sleep(STEP_SECONDS)


def _await_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _computing(matrix: Tensor, count: int) -> Callable[[], None]:
    """Return a step of matrix products, for which the host does not wait on a GPU.

    Args:
        matrix: each product's factors.
        count: number of products that are timed to find how many make a step.
    """
    out = torch.empty_like(matrix)

    def run(products: int) -> None:
        for _ in range(products):
            torch.mm(matrix, matrix, out=out)

    run(count)
    _await_gpu()
    started = perf_counter()
    run(count)
    _await_gpu()
    products = round(count * STEP_SECONDS / (perf_counter() - started))
    return lambda: run(products)
