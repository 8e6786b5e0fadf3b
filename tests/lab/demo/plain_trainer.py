"""A training script that imports nothing of Paceline, saves by itself and resumes.

A rank is slower while its folder of orders has a file of its number.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

EVERY = 200
STEP_SECONDS = 0.05

dist.init_process_group("gloo")
rank = dist.get_rank()
directory = Path(os.environ["CHECKPOINTS"])
latest = directory / "latest.pt"
slow = directory / f"slow-{rank}"


class Kernels(nn.Module):
    """Takes time as kernels of a device do."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_SECONDS * (3 if slow.exists() else 1))
        return batch


torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(Kernels(), nn.Linear(16, 16)))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
if latest.exists():
    saved = torch.load(latest)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while True:
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % EVERY == 0 and rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, directory / "new.pt")
        os.replace(directory / "new.pt", latest)
