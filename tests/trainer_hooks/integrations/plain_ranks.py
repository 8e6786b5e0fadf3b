"""A training with DistributedDataParallel that does not know Paceline.

    plain_ranks.py [raise | kill | exit | early]

The argument ends rank 1 in the sixth of ten steps; `early`: before it calls
`init_process_group`, once rank 0 is recorded.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STATUS = 77


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("bad batch 17")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(STATUS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["early"] and os.environ["RANK"] == "1":
        while not glob.glob(os.environ["PACELINE_RING_DIRECTORY"] + "/*.r0.ring"):
            time.sleep(0.01)
        raise ValueError("unknown optimizer 'adamv'")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        if len(sys.argv) > 1 and step == 5 and dist.get_rank() == 1:
            end(sys.argv[1])
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()
