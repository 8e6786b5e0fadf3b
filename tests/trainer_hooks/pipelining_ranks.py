"""One rank of a training with `torch.distributed.pipelining` whose kernels sleep.

    SCHEDULE MICROBATCHES CHUNKS STEPS FORWARD_MS BACKWARD_MS [DATA_RANKS]

Nothing about stages, microbatches or the topology is annotated.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

import paceline

WIDTH = 8


class _Sleep(torch.autograd.Function):
    """Takes a given time forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Part(nn.Module):
    """One part of the model."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = forward_seconds, backward_seconds

    def forward(self, value: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(self.linear(value), *self.seconds)
        return slept


def parts_of(kind: str, rank: int, stages: int, chunks: int) -> list[int]:
    """Return the parts of the model that a stage holds."""
    if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * stages - 1 - rank]
    return [chunk * stages + rank for chunk in range(chunks)]


def main() -> None:
    kind, microbatches, chunks, steps = sys.argv[1], *map(int, sys.argv[2:5])
    forward, backward = (float(value) / 1000 for value in sys.argv[5:7])
    data_ranks = int(sys.argv[7]) if len(sys.argv) > 7 else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    paceline.init()
    world_size = int(os.environ["WORLD_SIZE"])
    stages = world_size // data_ranks
    # As picotron lays out ranks: the replica is outermost.
    mesh = init_device_mesh("cpu", (data_ranks, stages), mesh_dim_names=("replicas", "stages"))
    group, rank = mesh.get_group("stages"), mesh.get_local_rank("stages")
    numbers = parts_of(kind, rank, stages, chunks)
    modules = [Part(forward, backward) for _ in numbers]
    if data_ranks > 1:
        replicas = mesh.get_group("replicas")
        modules = [DistributedDataParallel(each, process_group=replicas) for each in modules]  # type: ignore[misc]
    parts = [
        PipelineStage(module, number, stages * chunks, torch.device("cpu"), group=group)
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule = getattr(torch_schedules, kind)(
        parts[0] if issubclass(getattr(torch_schedules, kind), _single()) else parts,
        n_microbatches=microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    batches = [torch.randn(microbatches, WIDTH) for _ in range(steps)]
    for batch in paceline.steps(batches):
        arguments = (batch,) if 0 in numbers else ()
        last = stages * chunks - 1 in numbers
        schedule.step(*arguments, **({"target": batch, "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
    paceline.finish()
    dist.destroy_process_group()
    os._exit(0)  # the mesh keeps gloo's threads alive, which may abort when the interpreter ends


def _single() -> type:
    return torch_schedules.PipelineScheduleSingle


if __name__ == "__main__":
    main()
