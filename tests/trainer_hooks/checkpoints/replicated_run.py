"""One rank of a DDP training on gloo; rank `OUTLIER` flips one bit of a parameter after `STEP`.

python replicated_run.py RANK WORLD PORT DIRECTORY OUTLIER STEP: rank 0 prints what is
reported.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import hooks

STEPS = 120


def main(rank: int, world: int, port: int, directory: str, outlier: int, step: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    earlier = DistributedDataParallel(nn.Linear(4, 4))
    first = paceline.Checkpoints(f"{directory}/first", every=0, memory=False, model=earlier)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    state = paceline.Checkpoints(directory, every=0, memory=False, model=model, optimizer=optimizer)
    check = state._replicas
    assert check is not None, "DDP has replicas"
    assert first._replicas is not None
    first._replicas._store.set(f"probe/{rank}", "of the first training")
    assert not check._store.check([f"probe/{rank}"]), "each training has its own keys"
    reported: list[str] = []
    hooks.replicas_differ = reported.append
    for number in paceline.steps(range(STEPS), state=state):
        model(torch.full((4, 16), 0.01 * (rank + number))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        check.every = 8  # these steps are too short for a budget of 0.1%
        if rank == outlier and number == step:
            model.module.weight.data.view(torch.int32)[3, 5] ^= 1 << 7
        time.sleep(0.005)
    if rank == 0:
        deadline = time.monotonic() + (30.0 if outlier >= 0 else 2.0)
        while not reported and time.monotonic() < deadline:
            time.sleep(0.05)
            state._compare_replicas()
        print("\n".join(reported))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], *map(int, sys.argv[5:7]))
