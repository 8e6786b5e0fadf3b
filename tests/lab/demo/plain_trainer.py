"""A training script that imports nothing of Paceline, saves by itself and resumes.

With BY=dcp all ranks save with torch.distributed.checkpoint, else rank 0 with torch.save. A rank is
slower while its folder of orders has a file of its number.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

EVERY = 200
STEP_SECONDS = 0.05

dist.init_process_group("gloo")
rank = dist.get_rank()
directory = Path(os.environ["CHECKPOINTS"])
by_dcp = os.environ["BY"] == "dcp"
latest = directory / ("latest" if by_dcp else "latest.pt")
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


def content() -> dict[str, Any]:
    """Return the state of all, as torch.distributed.checkpoint saves and loads it."""
    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1], "step": torch.tensor(step)}


def save_by_all() -> None:
    """Save with torch.distributed.checkpoint, then let `latest` point to it."""
    target = directory / f"step-{step}"
    dcp.save(content(), checkpoint_id=target)
    if rank == 0:
        (directory / "new").symlink_to(target)
        (directory / "new").replace(latest)


def save_by_first() -> None:
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save({**state, "step": step}, directory / "new.pt")
        (directory / "new.pt").replace(latest)


if latest.exists() and by_dcp:
    loaded = content()
    dcp.load(loaded, checkpoint_id=latest)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    step = int(loaded["step"])
elif latest.exists():
    saved = torch.load(latest)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while True:
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % EVERY == 0:
        save_by_all() if by_dcp else save_by_first()
