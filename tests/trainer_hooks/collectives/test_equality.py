"""The hooks do not change what is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

TRAINER = """
import hashlib, os, sys, torch, torch.distributed as dist, paceline
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
if os.environ["PACELINE_RING_DIRECTORY"]:
    paceline.init()
torch.manual_seed(1)
layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
model = nn.Sequential(*layers)
model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=32 * 33 * 4 / 2**20)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.Generator().manual_seed(rank)
for step in paceline.steps(range(50)):
    optimizer.zero_grad()
    model(torch.randn(8, 32, generator=data)).square().mean().backward()
    optimizer.step()
paceline.finish()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(digest.hexdigest())
dist.destroy_process_group()
"""


LATE = """
import gc, os, time, torch, torch.distributed as dist, paceline
dist.init_process_group("gloo")
paceline.init()
for step in paceline.steps(range(2)):
    works = [dist.all_reduce(torch.ones(4), async_op=True)]
    works[0].wait()
port = int(os.environ["OTHER_PORT"])
store = dist.TCPStore("127.0.0.1", port, 2, dist.get_rank() == 0)
if dist.get_rank() == 0:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(8)]
    paceline.finish()
    gc.collect()
    store.set("finished", "yes")
else:
    store.wait(["finished"])
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(8)]
for work in works:
    work.wait()
gc.collect()
print("done")
dist.destroy_process_group()
"""


def outputs_of_two_ranks(source: str, ring_directory: str, pure: str = "") -> set[str]:
    """Run two ranks; return what their scripts printed: gloo before torch 2.10 prints, too."""
    environment = {
        **os.environ,
        "PACELINE_RING_DIRECTORY": ring_directory,
        "PACELINE_JOB": "local",
        "PACELINE_PURE_PYTHON": pure,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OTHER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", source],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return {"\n".join(line for line in lines if "[Gloo]" not in line) for lines in printed}


@pytest.mark.parametrize(
    "pure", [pytest.param("", id="built"), pytest.param("1", id="pure", marks=pytest.mark.campaign)]
)
def test_weights_after_50_steps_are_bit_equal_with_and_without_the_hooks(
    tmp_path: Path, pure: str, library_of_process_groups: None
) -> None:
    without = outputs_of_two_ranks(TRAINER, "")
    with_hooks = outputs_of_two_ranks(TRAINER, str(tmp_path), pure)
    assert len(without) == 1
    assert with_hooks == without
    assert len(list(tmp_path.glob("*.ring"))) == 2


@pytest.mark.parametrize("pure", ["", "1"], ids=["built", "pure"])
def test_calls_that_complete_after_finish_harm_nothing(
    tmp_path: Path, pure: str, library_of_process_groups: None
) -> None:
    assert outputs_of_two_ranks(LATE, str(tmp_path), pure) == {"done"}
