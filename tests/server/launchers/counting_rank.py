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

from training_files import TrainingFiles

import paceline

directory, step_seconds = Path(sys.argv[1]), float(sys.argv[2])
run, node, rank = os.environ["TEST_RUN"], os.environ["TEST_NODE"], int(os.environ["TEST_RANK"])
files, slow = TrainingFiles(directory), directory / f"slow-{node}"
files.add_start(run, rank, node)

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
begin = files.step()
for step in paceline.steps(range(begin, 1_000_000), start=begin):
    time.sleep(step_seconds * (2 if slow.exists() else 1))
    if "gloo" in sys.argv:
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        files.save(step + 1)
        paceline.checkpoint_saved(step + 1)
