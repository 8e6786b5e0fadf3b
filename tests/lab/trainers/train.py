"""Train as users do, four ranks: TRAINER names the parallelism and FAULT what rank 2 does wrong.

A step takes about 40 ms: matrix products, and a sleep in place of an accelerator so that four ranks
fit on two cores. With LINES=0 nothing of Paceline is called here.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

WIDTH = 128
LAYERS = 8
BATCH = 32
SECONDS = 0.03  # emulated work of the accelerator per step
ONSET = int(os.environ.get("ONSET", "60"))
FAULTY = 2  # the rank

trainer, fault = os.environ["TRAINER"], os.environ["FAULT"]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.manual_seed(0)


class Layer(nn.Module):
    """A linear layer that keeps the accelerator busy in forward and backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.relu(self.second(torch.relu(self.first(values))))


def layers(count: int = LAYERS, seconds: float = SECONDS) -> nn.Sequential:
    return nn.Sequential(*(Layer(seconds / count) for _ in range(count)))


# Trainers: each returns the function that does one step with a batch.

Step = Callable[[torch.Tensor, Callable[[], None]], None]
mesh: Any = None


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(model: nn.Module, microbatches: int = 1) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(batch: torch.Tensor, maybe_fail: Callable[[], None]) -> None:
        optimizer.zero_grad()
        for number in range(microbatches):
            is_last = number == microbatches - 1
            with nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                loss = loss_of(model(batch)) / microbatches
                if is_last:
                    maybe_fail()
                loss.backward()
        optimizer.step()

    step.model = model  # type: ignore[attr-defined]
    return step


def ddp() -> Step:
    return train(DistributedDataParallel(layers(), bucket_cap_mb=0.2))


def accumulation() -> Step:
    model = DistributedDataParallel(layers(seconds=SECONDS / 2), bucket_cap_mb=0.2)
    return train(model, microbatches=2)


def sharded(model: nn.Sequential, along: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=along)
    fully_shard(model, mesh=along)
    return model


def fsdp2() -> Step:
    return train(sharded(layers(4), mesh))


def fsdp2_tp() -> Step:
    model = layers(4)
    for layer in model:
        parallelize_module(
            layer, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
    return train(sharded(model, mesh["dp"]))


def pipeline(kind: type, microbatches: int) -> Step:
    stage_number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    # Forward passes only take time here, so each has the time of a whole microbatch.
    module = layers(4, SECONDS / microbatches)
    stage = PipelineStage(
        module, stage_number, stages, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = kind(stage, microbatches, loss_fn=lambda output, target: loss_of(output - target))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)
    replicas = mesh.get_group("dp")

    def step(batch: torch.Tensor, maybe_fail: Callable[[], None]) -> None:
        optimizer.zero_grad()
        maybe_fail()
        if stage_number == 0:
            schedule.step(batch)
        else:
            schedule.step(target=torch.zeros_like(batch))
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
        optimizer.step()

    step.model = module  # type: ignore[attr-defined]
    return step


AXES: dict[str, tuple[str, ...]] = {
    "fsdp2": ("dp",),
    "fsdp2_tp": ("dp", "tp"),
    "gpipe": ("pp", "dp"),
    "1f1b": ("pp", "dp"),
}
TRAINERS: dict[str, Callable[[], Step]] = {
    "ddp": ddp,
    "accumulation": accumulation,
    "fsdp2": fsdp2,
    "fsdp2_tp": fsdp2_tp,
    "gpipe": lambda: pipeline(ScheduleGPipe, 4),
    "1f1b": lambda: pipeline(Schedule1F1B, 4),
}


# Faults of the faulty rank. Those that hang block in a function named after the fault.


def slow() -> None:
    time.sleep(0.03)


def slow_compute() -> None:
    matrix, until = torch.randn(128, 128), time.perf_counter() + 0.03
    while time.perf_counter() < until:
        matrix = (matrix @ matrix).clamp(-1, 1)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def endless() -> None:
    number = 0
    while True:
        number += 1


def gil() -> None:
    """Another thread holds the interpreter's lock: a regular expression that runs forever."""
    catastrophic = threading.Thread(
        target=lambda: re.match(r"(a+)+$", "a" * 64 + "b"), name="tokenizer"
    )
    catastrophic.start()
    time.sleep(0.01)


def read_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def read_file() -> None:
    reading, writing = os.pipe()
    os.fdopen(reading, "rb").read(1)
    os.close(writing)


def another_op() -> None:
    dist.all_gather_into_tensor(torch.empty(4 * WIDTH), torch.ones(WIDTH))


def skip_subgroup() -> None:
    """Handled where the others enter the collective of the subgroup."""


IN_STEP: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        slow,
        slow_compute,
        lock,
        endless,
        gil,
        read_socket,
        read_file,
        another_op,
    )
}


class Batches(IterableDataset[torch.Tensor]):
    """Batches without end; each takes a millisecond."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.chance = torch.Generator().manual_seed(rank)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.steps):
            time.sleep(0.001)
            if fault == "slow_data" and rank == FAULTY and number > ONSET:
                time.sleep(0.03)
            yield torch.randn(BATCH, WIDTH, generator=self.chance)


def main() -> None:
    global mesh
    dist.init_process_group("gloo")
    if (axes := AXES.get(trainer)) is not None:
        shape = (world_size,) if len(axes) == 1 else (2, world_size // 2)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    loader: Iterable[torch.Tensor] = DataLoader(Batches(100_000), batch_size=None)
    if os.environ.get("LINES", "1") == "1":
        paceline = importlib.import_module("paceline")
        paceline.init(mesh=mesh)
        loader = paceline.steps(loader)
    step = TRAINERS[trainer]()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for number, batch in enumerate(loader):
        is_faulty = rank == FAULTY and number > ONSET

        def maybe_fail(is_faulty: bool = is_faulty) -> None:
            if is_faulty and fault in IN_STEP:
                IN_STEP[fault]()

        if fault == "left" and is_faulty:
            break
        if fault == "exit" and is_faulty:
            return
        if fault == "stop" and is_faulty:
            os.kill(os.getpid(), 19)
        if fault in ("skip_subgroup", "subgroup") and not (fault == "skip_subgroup" and is_faulty):
            dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        if fault == "healthy":
            everyday(number, step)
        try:
            if fault == "caught" and is_faulty:
                raise ValueError("a batch that cannot be parsed")
            step(batch, maybe_fail)
        except ValueError:
            retry_later()
    if fault == "left":
        time.sleep(1000)


def retry_later() -> None:
    time.sleep(1000)


def everyday(number: int, step: Step) -> None:
    """Do things that healthy trainings do beside their steps."""
    model: nn.Module = step.model  # type: ignore[attr-defined]
    if number % 97 == 96:
        gc.collect()
    if number % 200 == 199 and rank == 0:  # evaluation on one rank
        with torch.no_grad():
            for _ in range(4):
                time.sleep(0.1)
                torch.randn(WIDTH, WIDTH).matmul(torch.randn(WIDTH, WIDTH))
    if number % 250 == 249 and rank == 0:
        shards = {
            key: getattr(value, "_local_tensor", value) for key, value in model.named_parameters()
        }
        with tempfile.TemporaryFile() as file:
            torch.save(shards, file)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
