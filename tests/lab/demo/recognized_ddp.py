"""A plain DistributedDataParallel training that calls nothing of Paceline but `init`.

It evaluates every 50 steps and rank 0 saves every 40. CASE=slow: rank 2 is slower from step 100 on.
ACCUMULATED: microbatches per step. STEPS: how many to train.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

SLOW_FROM = 100

torch.set_num_threads(1)
dist.init_process_group("gloo")
paceline.init()
rank, is_slow = dist.get_rank(), os.environ["CASE"] == "slow"
accumulated, steps = int(os.environ["ACCUMULATED"]), int(os.environ["STEPS"])
torch.manual_seed(0)
layers = [nn.Linear(128, 128) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.06)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
dataset = TensorDataset(torch.randn(1 << 12, 128))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
validation = DataLoader(TensorDataset(torch.randn(40, 128)), batch_size=8)


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        for (batch,) in validation:
            time.sleep(0.02)
            model(batch)
    model.train()


def train(batch: torch.Tensor, completed: int) -> None:
    time.sleep(0.03 / accumulated)
    if is_slow and rank == 2 and completed >= SLOW_FROM:
        time.sleep(0.03 / accumulated)
    model(batch).square().mean().backward()


completed = microbatches = 0
while completed < steps:
    for (batch,) in loader:
        microbatches += 1
        if microbatches % accumulated:
            with model.no_sync():
                train(batch, completed)
            continue
        train(batch, completed)
        optimizer.step()
        optimizer.zero_grad()
        completed += 1
        if completed % 50 == 0:
            evaluate()
        if completed % 40 == 0 and rank == 0:
            torch.save(model.state_dict(), os.environ["SAVED"])
        if completed == steps:
            break
dist.destroy_process_group()
