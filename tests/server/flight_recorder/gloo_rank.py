"""One rank of a real gloo job that stops in the requested way and writes its dump.

python gloo_rank.py RANK WORLD_SIZE FAULT DIRECTORY; the fault is on rank 1.
"""

import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
FAULT, DIRECTORY = sys.argv[3], Path(sys.argv[4])
# Number of entries of each rank when it hangs.
BEFORE = 3


def train() -> None:
    values = torch.ones(4)
    if RANK == 1 and FAULT == "skip":
        return
    if RANK == 1 and FAULT == "other operation":
        dist.all_gather([torch.ones(4) for _ in range(WORLD_SIZE)], values)
    else:
        dist.all_reduce(values)


def recorded() -> bytes:
    return torch._C._distributed_c10d._dump_fr_trace()


dist.init_process_group(
    "gloo", init_method=f"file://{DIRECTORY}/store", rank=RANK, world_size=WORLD_SIZE
)
pair = dist.new_group([0, 1], group_desc="pair")
for _ in range(BEFORE):
    dist.all_reduce(torch.ones(4))
if RANK < 2:
    dist.all_reduce(torch.ones(4), group=pair)
entries = BEFORE + (RANK < 2)
stuck = FAULT != "none" and not (FAULT == "skip" and RANK == 1)
if FAULT != "none":
    threading.Thread(target=train, daemon=True).start()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    found = pickle.loads(recorded())["entries"]  # its own dump, from its own memory
    if len(found) == entries + stuck and all(e["retired"] for e in found[:entries]):
        break
    time.sleep(0.02)
draft = DIRECTORY / f"draft of {RANK}."
draft.write_bytes(recorded())
draft.rename(DIRECTORY / f"dumps/_dump_{RANK}")
while time.monotonic() < deadline and len(os.listdir(DIRECTORY / "dumps")) < WORLD_SIZE:
    time.sleep(0.02)
os._exit(0)
