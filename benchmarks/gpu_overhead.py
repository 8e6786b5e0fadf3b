"""The time that the hooks add to the steps of a DistributedDataParallel model on a GPU, with NCCL.

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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter_ns

from benchmarks.harness import Result
from benchmarks.harness.recorded import check_recorded


@dataclass(frozen=True)
class Model:
    """A transformer of LAYERS layers, and the steps of a block."""

    width: int
    sequences: int  # number of sequences of 256 tokens
    bucket_mb: float  # gradients that are reduced together
    steps: int


LAYERS = 8
ROUNDS = 40
WARM_ROUNDS = 5
GOAL_PERCENT = 0.5
MODELS = {
    "device is busy": Model(width=2048, sequences=64, bucket_mb=25.0, steps=6),
    "device waits for the host": Model(width=128, sequences=2, bucket_mb=0.1, steps=15),
}


def measure() -> Iterator[Result]:
    import torch  # noqa: PLC0415 (the processes choose when it is imported)

    if not torch.cuda.is_available():
        print("gpu_overhead needs a CUDA device: nothing is measured", file=sys.stderr)
        return
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            plain, same, hooked = rounds(directory, model)
            check_recorded(directory)
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
        yield Result(f"overhead on a GPU, {name}: step", median(plain) / model.steps / 1e6, "ms")


def rounds(directory: str, model: Model) -> tuple[list[float], ...]:
    """Return the wall time of each block, in nanoseconds: of each process, in each round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rings in ("", "", directory):
        own, other = context.Pipe()
        process = context.Process(target=train, args=(other, rings, model), daemon=True)
        process.start()
        other.close()  # so that the end of the process ends `recv`
        pipes.append(own)
        processes.append(process)
    walls: list[list[float]] = [[] for _ in pipes]
    for number in range(WARM_ROUNDS + ROUNDS):
        for place in range(len(pipes)):
            each = (number + place) % len(pipes)  # each process is first, second, third in turn
            pipes[each].send(True)
            wall = pipes[each].recv()
            if number >= WARM_ROUNDS:
                walls[each].append(wall)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    return tuple(walls)


def train(pipe: Connection, rings: str, what: Model) -> None:
    """Train in a process of its own; with Paceline if `rings` is the directory of an agent."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    layer = nn.TransformerEncoderLayer(what.width, 8, 4 * what.width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model = nn.parallel.DistributedDataParallel(
        encoder.to(device, torch.bfloat16), device_ids=[0], bucket_cap_mb=what.bucket_mb
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(what.sequences, 256, what.width, device=device, dtype=torch.bfloat16)
    boundaries: Iterator[None] = itertools.repeat(None)
    if rings:
        os.environ["PACELINE_RING_DIRECTORY"] = rings
        import paceline  # noqa: PLC0415

        paceline.init()
        boundaries = iter(paceline.steps(boundaries))
    while pipe.recv():
        started = perf_counter_ns()
        for _ in range(what.steps):
            next(boundaries)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        pipe.send(perf_counter_ns() - started)
    dist.destroy_process_group()
