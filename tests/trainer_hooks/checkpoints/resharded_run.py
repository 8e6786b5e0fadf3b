"""Train with FSDP2, or load what was trained and print it.

    python resharded_run.py DIRECTORY STEPS

It prints a hash of the whole parameters and optimizer states, which does not depend on the number
of ranks, and the step.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import paceline

directory, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(dist.get_world_size())
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
state = paceline.Checkpoints(directory, every=2, model=model, optimizer=optimizer)
for batch in paceline.steps([torch.ones(2, 6)] * steps, state=state):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
state.wait()


def whole(tensor: Tensor) -> bytes:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes(full.detach().flatten().view(torch.uint8).tolist())


digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(whole(tensor))
for values in optimizer.state_dict()["state"].values():
    for tensor in values.values():
        digest.update(whole(tensor))
print(state.step, digest.hexdigest(), flush=True)
dist.destroy_process_group()
