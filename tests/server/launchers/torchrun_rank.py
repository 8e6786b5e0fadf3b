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
from training_files import TrainingFiles

import paceline

files, step_seconds = TrainingFiles(Path(sys.argv[1])), float(sys.argv[2])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
begin = files.step()
run, node = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TEST_NODE"]
files.add_start(run, rank, node, begin, dist.get_world_size())

paceline.init()
for step in paceline.steps(range(begin, 1_000_000), start=begin):
    time.sleep(step_seconds)
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        files.save(step + 1)
        paceline.checkpoint_saved(step + 1)
