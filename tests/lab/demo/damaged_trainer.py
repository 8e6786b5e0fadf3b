"""A DDP training with `paceline.Checkpoints` whose data or memory gets damaged.

    python damaged_trainer.py DIRECTORY

Batch `POISONED` has a NaN in it, if the environment names one. A file `flip-N` in the directory has
rank N flip one bit of a parameter, once. Each rank appends a line per step to DIRECTORY/rankN:
generation, batch, loss, and a digest of its parameters before the step.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline

DIRECTORY = Path(sys.argv[1])
BATCHES = 1_000_000
POISONED = int(os.environ.get("POISONED", "-1"))
STEP_SECONDS = 0.1

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
rank = dist.get_rank()
flip = DIRECTORY / f"flip-{rank}"
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state = paceline.Checkpoints(
    DIRECTORY / "checkpoints", every=20, keep=50, model=model, optimizer=optimizer
)
with (DIRECTORY / f"rank{rank}").open("a", buffering=1) as log:
    for number in paceline.steps(range(BATCHES), state=state):
        content = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(4 * number + rank))
        if number == POISONED:
            batch[0, 0] = float("nan")
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        paceline.report(loss=loss.item())
        digest = hashlib.sha256(content).hexdigest()
        log.write(f"{os.environ['PACELINE_GENERATION']} {number} {loss.item()} {digest}\n")
        if flip.exists():
            flip.unlink()
            model.module[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 20
        time.sleep(STEP_SECONDS)  # as kernels of a device
