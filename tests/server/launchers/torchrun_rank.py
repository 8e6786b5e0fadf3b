"""A rank of a torchrun job: trains with gloo, counts steps in a file, and resumes from it.

torchrun_rank.py DIRECTORY STEP_SECONDS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

directory, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
state = directory / "step"
dist.init_process_group("gloo")
begin = int(state.read_text() or 0) if state.exists() else 0
with (directory / "starts").open("a") as starts:  # each start of each rank, to count them
    count, node = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TEST_NODE"]
    starts.write(f"{count} {rank} {node} {os.getpid()} {begin} {dist.get_world_size()}\n")

paceline.init()
for step in paceline.steps(range(begin, 1_000_000), start=begin):
    time.sleep(step_seconds)
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        temporary = state.with_suffix(".new")
        temporary.write_text(str(step + 1))
        temporary.rename(state)
        paceline.checkpoint_saved(step + 1)
