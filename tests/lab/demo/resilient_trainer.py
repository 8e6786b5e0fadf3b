"""A training whose ranks stay in their processes when another one is lost.

    python resilient_trainer.py DIRECTORY STEPS

Each rank appends a line per step to DIRECTORY/rankN (step, loss, batch), and one per entry of the
function to DIRECTORY/entriesN (generation, pid, where the state is from). At the end it writes the
digest of its model and optimizer to DIRECTORY/finalN. While DIRECTORY/slow-NODE exists, ranks of
that node are slow. Gradients are summed one by one: DDP reduces the first step of a model in other
buckets.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline

DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])
WIDTH, BATCH = 16, 4


def digest(tensors: list[Tensor]) -> str:
    content = b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()


def append(name: str, line: str) -> None:
    with (DIRECTORY / f"{name}{os.environ['RANK']}").open("a") as file:
        file.write(line + "\n")


@paceline.resilient
def train() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, WIDTH))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(STEPS * BATCH * size, WIDTH, generator=generator))
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    slow = DIRECTORY / f"slow-{Path(os.environ['PACELINE_NODE_DIRECTORY']).name}"
    state = paceline.Checkpoints(
        DIRECTORY / "checkpoints", every=20, model=model, optimizer=optimizer, loader=loader
    )
    is_first = True
    for (x,) in paceline.steps(loader, state=state):
        if is_first:
            is_first = False
            generation = os.environ["PACELINE_GENERATION"]
            append("entries", f"{generation} {os.getpid()} {state.resumed_from}")
        loss = (model(x) - x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        append("rank", f"{state.step} {loss.item().hex()} {digest([x])[:12]}")
        time.sleep(0.2 if slow.exists() else 0.02)  # so that there are moments to kill a rank at
    state.wait()
    moments = [values["exp_avg"] for values in optimizer.state.values()]
    (DIRECTORY / f"final{rank}").write_text(digest([*model.parameters(), *moments]))
    dist.barrier()  # no rank leaves while another one still trains
    dist.destroy_process_group()


train()
