"""A training of plain torch that is saved and resumed by the two lines of `paceline.Checkpoints`.

    python train.py ddp|fsdp2|pipelining

It trains until it is ordered to end (`orders`), and then saves its last step.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import orders
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline

WIDTH = 64
LAYERS = 4
SAMPLES = 512

Step = Callable[[Tensor, Tensor], None]


class DropoutLayer(nn.Module):
    """A layer with dropout, which needs the random states of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.linear(x)).relu())


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, x.roll(1, dims=1))


def replicated(wrap: Callable[[nn.Sequential], Any]) -> tuple[nn.Module, Any, Step, Any]:
    """Return model, optimizer, step and loader of a training whose ranks are replicas or shards."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(*(DropoutLayer() for _ in range(LAYERS))))
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return (
        model,
        optimizer,
        step,
        DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset())),
    )


def ddp() -> tuple[nn.Module, Any, Step, Any]:
    # With unused parameters to look for, buckets stay as they are: sums have one order.
    return replicated(lambda model: DistributedDataParallel(model, find_unused_parameters=True))


def fsdp2() -> tuple[nn.Module, Any, Step, Any]:
    def wrap(model: nn.Sequential) -> Any:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return replicated(wrap)


def pipelining() -> tuple[nn.Module, Any, Step, Any]:
    """One stage per rank; all of them read the same batches."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    module = DropoutLayer()
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, stages, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        if rank == 0:
            schedule.step(x)
        elif rank == stages - 1:
            schedule.step(target=y)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    generator = torch.Generator().manual_seed(7)
    return (
        module,
        optimizer,
        step,
        DataLoader(dataset(), batch_size=16, shuffle=True, generator=generator),
    )


def main(trainer: str) -> None:
    torch.set_num_threads(1)
    random.seed(1)
    numpy.random.seed(1)
    dist.init_process_group("gloo")
    paceline.init()
    model, optimizer, step, loader = {"ddp": ddp, "fsdp2": fsdp2, "pipelining": pipelining}[
        trainer
    ]()
    state = paceline.Checkpoints(
        os.environ["PACELINE_CHECKPOINT_DIRECTORY"],
        every=int(os.environ["CHECKPOINT_STEPS"]) or None,
        model=model,
        optimizer=optimizer,
    )
    is_last = False
    for epoch in state.epochs(1_000_000):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y in paceline.steps(loader, state=state):
            is_last = orders.before(state.step)
            if is_last:
                break
            step(x, y)
            orders.after(state.step + 1)
        if is_last:
            break
    if is_last:
        state.save()
    state.wait()
    dist.barrier()  # no rank leaves while another one still saves
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
