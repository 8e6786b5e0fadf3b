"""A rank of a job, one per node: counts steps in a file, which it resumes from.

counting_rank.py DIRECTORY STEP_SECONDS [gloo]

TEST_RUN is the number of earlier starts of the job, TEST_RANK and TEST_NODE are the place of this
rank, TEST_RANKS is the number of ranks. A node is twice as slow while the file DIRECTORY/slow-NODE
exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import paceline

directory, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
run, node, rank = os.environ["TEST_RUN"], os.environ["TEST_NODE"], int(os.environ["TEST_RANK"])
state = directory / "step"
slow = directory / f"slow-{node}"
with (directory / "starts").open("a") as starts:  # each start of each rank, to count them
    starts.write(f"{run} {rank} {node} {os.getpid()}\n")

if "gloo" in sys.argv:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store-{run}",
        rank=rank,
        world_size=int(os.environ["TEST_RANKS"]),
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
