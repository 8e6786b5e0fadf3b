"""A training as users write it: plain torch, with a choice of parallelism.

torchrun --nproc-per-node 4 train.py --trainer fsdp2
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from orders import Orders, UnreadableBatchError, retry_later
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LAYERS = 8
MICROBATCHES = 4

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
orders = Orders()
mesh: Any = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=TRAINERS, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bucket-mb", type=float, default=2.0, help="of DDP")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--variable-lengths", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--evaluate-seconds", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--collect-every", type=int, default=0)
    parser.add_argument("--pairs", action="store_true", help="a collective in pairs of ranks")
    parser.add_argument(
        "--accelerator-seconds", type=float, default=0.0, help="sleep per step beside the compute"
    )
    return parser.parse_args()


class Layer(nn.Module):
    """A linear layer; it may keep an emulated accelerator busy."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.relu(self.second(torch.relu(self.first(values))))


def layers(count: int = LAYERS, share: float = 1.0) -> nn.Sequential:
    seconds = arguments.accelerator_seconds * share / count
    made = nn.Sequential(*(Layer(arguments.width, seconds) for _ in range(count)))
    if arguments.compile:  # each size of a batch is compiled when it first occurs
        made.compile(backend="aot_eager", dynamic=False)
    return made


# Trainers: each returns its model and the function that does one step with a batch.

Step = Callable[[torch.Tensor, Callable[[], None]], None]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(model: nn.Module, microbatches: int = 1) -> tuple[nn.Module, Step]:
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

    return model, step


def ddp() -> tuple[nn.Module, Step]:
    return train(DistributedDataParallel(layers(), bucket_cap_mb=arguments.bucket_mb))


def accumulation() -> tuple[nn.Module, Step]:
    return train(
        DistributedDataParallel(layers(share=0.5), bucket_cap_mb=arguments.bucket_mb),
        microbatches=2,
    )


def sharded(model: nn.Sequential, along: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=along)
    fully_shard(model, mesh=along)
    return model


def fsdp2() -> tuple[nn.Module, Step]:
    return train(sharded(layers(4), mesh))


def fsdp2_tp() -> tuple[nn.Module, Step]:
    model = layers(4)
    for layer in model:
        parallelize_module(
            layer, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
    return train(sharded(model, mesh["dp"]))


def pipeline(kind: type) -> tuple[nn.Module, Step]:
    stage_number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    # Only forward passes take the accelerator's time, so each has that of a whole microbatch.
    module = layers(4, 1.0 / MICROBATCHES)
    stage = PipelineStage(
        module, stage_number, stages, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = kind(stage, MICROBATCHES, loss_fn=lambda output, target: loss_of(output - target))
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

    return module, step


AXES: dict[str, tuple[str, ...]] = {
    "fsdp2": ("dp",),
    "fsdp2_tp": ("dp", "tp"),
    "gpipe": ("pp", "dp"),
    "1f1b": ("pp", "dp"),
}
TRAINERS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "ddp": ddp,
    "accumulation": accumulation,
    "fsdp2": fsdp2,
    "fsdp2_tp": fsdp2_tp,
    "gpipe": lambda: pipeline(ScheduleGPipe),
    "1f1b": lambda: pipeline(Schedule1F1B),
}


class Batches(Dataset[torch.Tensor]):
    """Batches without end. Each is sorted, in place of tokenizing it."""

    def __init__(self, width: int, rows: int, is_variable: bool) -> None:
        self.width, self.rows, self.is_variable = width, rows, is_variable

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> torch.Tensor:
        orders.in_loader(number)
        # Ranks that share the layers of a model train on the same batches.
        replica = rank if mesh is None else mesh.get_local_rank("dp")
        chance = torch.Generator().manual_seed(number * world_size + replica)
        rows = self.rows
        if self.is_variable:
            sizes = [max(1, int(rows * share)) for share in (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)]
            rows = sizes[int(torch.randint(len(sizes), (1,), generator=chance))]
        return torch.randn(rows, self.width, generator=chance).sort(dim=1).values


def loader_of(batches: Batches) -> DataLoader[torch.Tensor]:
    return DataLoader(batches, batch_size=None, num_workers=arguments.workers)


def unchanged(loader: Iterable[torch.Tensor], mesh: Any) -> Iterable[torch.Tensor]:
    return loader


def main(prepare: Callable[[Iterable[torch.Tensor], Any], Iterable[torch.Tensor]]) -> None:
    """Train. `prepare` gets the loader and the mesh before the model is built."""
    global mesh
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if (axes := AXES.get(arguments.trainer)) is not None:
        shape = (world_size,) if len(axes) == 1 else (2, world_size // 2)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    batches = Batches(arguments.width, arguments.batch, arguments.variable_lengths)
    loader = prepare(loader_of(batches), mesh)
    model, step = TRAINERS[arguments.trainer]()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    for number, batch in enumerate(loader):
        if orders.find("exit", number):
            return
        if orders.find("left", number):
            break
        if arguments.pairs and not orders.find("skip_subgroup", number):
            dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        everyday(number, model)
        try:
            step(batch, lambda number=number: orders.in_step(number))  # type: ignore[misc]
        except UnreadableBatchError:
            retry_later()
    time.sleep(1_000_000)


def everyday(number: int, model: nn.Module) -> None:
    """Do what healthy trainings do beside their steps."""

    def is_due(every: int) -> bool:
        return every > 0 and number % every == every - 1

    if is_due(arguments.collect_every):
        gc.collect()
    if is_due(arguments.evaluate_every) and rank == 0:
        evaluate()
    if is_due(arguments.checkpoint_every) and rank == 0:
        save(model)


def evaluate() -> None:
    until = time.monotonic() + arguments.evaluate_seconds
    with torch.no_grad():
        for _ in range(50):
            predict()
            time.sleep(arguments.accelerator_seconds / 4)
        while time.monotonic() < until:
            predict()


def predict() -> None:
    torch.randn(256, arguments.width).matmul(torch.randn(arguments.width, arguments.width))


def save(model: nn.Module) -> None:
    shards = {
        key: getattr(value, "_local_tensor", value) for key, value in model.named_parameters()
    }
    with tempfile.NamedTemporaryFile() as file:
        torch.save(shards, file)
        file.flush()
        os.fsync(file.fileno())


arguments = parse()

if __name__ == "__main__":
    main(unchanged)
