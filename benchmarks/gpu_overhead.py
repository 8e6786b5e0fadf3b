"""What the hooks add to the steps of a DistributedDataParallel model on a GPU, with NCCL.

Needs a CUDA device; without one there are no rows. Three processes with the same model take turns
to run a block of steps, each block until the device is idle: two without Paceline, which show the
noise, and one with it. The first model keeps the device busy, so the host runs ahead of it; the
second launches many short kernels, so the device waits for the host and each microsecond of the
hooks counts. Values are the median over rounds of the additional wall time of a block, as a share
of that of the first process, with its standard error.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter_ns

from benchmarks.harness import Result

ROUNDS = 80
WARM_ROUNDS = 5
GOAL_PERCENT = 0.5
# name: (layers, width, sequences of 256 tokens, steps of a block)
MODELS = {"device is busy": (8, 1024, 32, 10), "device waits for the host": (8, 128, 2, 15)}


def measure() -> Iterator[Result]:
    import torch  # noqa: PLC0415 (the processes choose when it is imported)

    if not torch.cuda.is_available():
        print("gpu_overhead needs a CUDA device: nothing is measured", file=sys.stderr)
        return
    for name, (*shape, steps) in MODELS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            plain, same, hooked = rounds(directory, (*shape,), steps)
        for label, walls, goal in (
            ("none, the same twice", same, None),
            ("hooks", hooked, GOAL_PERCENT),
        ):
            added = [(b / a - 1) * 100 for a, b in zip(plain, walls, strict=True)]
            deviation = 1.4826 * median(abs(each - median(added)) for each in added)
            error = 1.2533 * deviation / math.sqrt(len(added))
            row = f"overhead on a GPU, {name}: {label}"
            resolved = abs(median(added) - GOAL_PERCENT) >= 2 * error
            yield Result(row, median(added), "%", goal=goal, resolved=resolved)
            yield Result(f"{row}, standard error", error, "%")
        yield Result(f"overhead on a GPU, {name}: step", median(plain) / steps / 1e6, "ms")


def rounds(directory: str, shape: tuple[int, ...], steps: int) -> tuple[list[float], ...]:
    """Return the wall time of each block, in nanoseconds: of each process, in each round."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rings in ("", "", directory):
        own, other = context.Pipe()
        context.Process(target=train, args=(other, rings, shape, steps), daemon=True).start()
        pipes.append(own)
    walls: list[list[float]] = [[] for _ in pipes]
    order = list(range(len(pipes)))
    for number in range(WARM_ROUNDS + ROUNDS):
        for each in order if number % 2 else reversed(order):
            pipes[each].send(True)
            wall = pipes[each].recv()
            if number >= WARM_ROUNDS:
                walls[each].append(wall)
    for pipe in pipes:
        pipe.send(False)
    return tuple(walls)


def train(pipe: Connection, rings: str, shape: tuple[int, ...], steps: int) -> None:
    """Train in a process of its own; with Paceline if `rings` is the directory of an agent."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers, width, batch = shape
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.parallel.DistributedDataParallel(
        encoder.to(device, torch.bfloat16), device_ids=[0], bucket_cap_mb=2
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(batch, 256, width, device=device, dtype=torch.bfloat16)
    boundaries: Iterator[None] = itertools.repeat(None)
    if rings:
        os.environ["PACELINE_RING_DIRECTORY"] = rings
        import paceline  # noqa: PLC0415

        paceline.init()
        boundaries = iter(paceline.steps(boundaries))
    while pipe.recv():
        started = perf_counter_ns()
        for _ in range(steps):
            next(boundaries)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        pipe.send(perf_counter_ns() - started)
    dist.destroy_process_group()
