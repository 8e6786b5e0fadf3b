"""A rank of a Slurm job: counts steps in a file, which it resumes from.

slurm_rank.py DIRECTORY STEP_SECONDS [gloo]

A node is twice as slow while the file DIRECTORY/slow-NODE exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import paceline

directory, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["SLURM_PROCID"])
state = directory / "step"
slow = directory / f"slow-{os.environ['SLURMD_NODENAME']}"
with (directory / "starts").open("a") as starts:  # each start of each rank, to count them
    requeues = os.environ.get("SLURM_RESTART_COUNT", "0")
    starts.write(f"{requeues} {rank} {os.environ['SLURMD_NODENAME']} {os.getpid()}\n")

if "gloo" in sys.argv:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store-{requeues}",
        rank=rank,
        world_size=int(os.environ["SLURM_NTASKS"]),
    )

paceline.init()
begin = int(state.read_text() or 0) if state.exists() else 0
for step in paceline.steps(range(begin, 1_000_000), start=begin):
    time.sleep(step_seconds * (2 if slow.exists() else 1))
    if "gloo" in sys.argv:
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        temporary = state.with_suffix(".new")
        temporary.write_text(str(step + 1))
        temporary.rename(state)
        paceline.checkpoint_saved(step + 1)
