"""The hooks do not change what is trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.forked_python import ForkedPython
from tests.ports import free_port

# Parallelisms that this torch has on a CPU, with Paceline or without: FSDP2 of 2.6 needs streams,
# and pipelines of 2.7 to 2.10 hang or abort on gloo.
KINDS = [
    "ddp",
    *["fsdp2"] * (torch.__version__ >= (2, 7)),
    "tp",
    *["pp"] * (torch.__version__ >= (2, 11)),
]

# Each parallelism in turn. With four ranks, FSDP2 and tensor parallelism are combined.
TRAINER = """
import hashlib, os, sys, torch, torch.distributed as dist, paceline
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if os.environ["PACELINE_RING_DIRECTORY"]:
    paceline.init()
WIDTH = 32
KINDS = os.environ["KINDS"].split()
def layers(count):
    torch.manual_seed(1)
    made = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*made)
def split(model, mesh):
    plan = {str(2 * n): ColwiseParallel() if n % 2 == 0 else RowwiseParallel() for n in range(4)}
    return parallelize_module(model, mesh, plan)
def shard(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
def train(name, model, passes=None):
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.Generator().manual_seed(0 if "tp" in name else rank)
    for step in paceline.steps(range(50)):
        optimizer.zero_grad()
        batch = torch.randn(8, WIDTH, generator=data)
        if passes is None:
            model(batch).square().mean().backward()
        else:
            passes(batch)
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().numpy().tobytes())
    print(name, digest.hexdigest())
def pipeline():
    model = layers(2)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    def passes(batch):
        target = {"target": torch.ones_like(batch)} if rank == ranks - 1 else {}
        schedule.step(*([batch] if rank == 0 else []), **target)
    train("pp", model, passes)
bucket = WIDTH * (WIDTH + 1) * 4 / 2**20
train("ddp", nn.parallel.DistributedDataParallel(layers(12), bucket_cap_mb=bucket))
mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
if "fsdp2" in KINDS:
    train("fsdp2", shard(layers(4), mesh))
train("tp", split(layers(4), dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))))
if ranks == 4 and "fsdp2" in KINDS:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train("fsdp2_tp", shard(split(layers(4), mesh["tp"]), mesh["dp"]))
if "pp" in KINDS:
    pipeline()
paceline.finish()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a mesh keeps gloo's threads alive, which may abort when the interpreter ends
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


def outputs(source: str, ring_directory: str, pure: str = "", ranks: int = 2) -> list[str]:
    """Run the ranks; return what each script printed, without gloo's own lines."""
    environment = {
        **os.environ,
        "PACELINE_RING_DIRECTORY": ring_directory,
        "PACELINE_JOB": "local",
        "PACELINE_PURE_PYTHON": pure,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OTHER_PORT": str(free_port()),
        "KINDS": " ".join(KINDS),
    }
    processes = [
        ForkedPython(["-c", source], {**environment, "RANK": str(rank)}) for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks
    return ["\n".join(line for line in lines if "[Gloo]" not in line) for lines in printed]


@pytest.mark.parametrize(
    ("ranks", "pure"),
    [
        pytest.param(2, "", id="two ranks"),
        pytest.param(4, "", id="four ranks", marks=pytest.mark.campaign),
        pytest.param(2, "1", id="pure Python", marks=pytest.mark.campaign),
    ],
)
def test_weights_after_50_steps_are_bit_equal_with_and_without_the_hooks(
    tmp_path: Path, ranks: int, pure: str, library_of_process_groups: None
) -> None:
    without = outputs(TRAINER, "", ranks=ranks)
    with_hooks = outputs(TRAINER, str(tmp_path), pure, ranks)
    kinds = list(KINDS)
    if ranks == 4 and "fsdp2" in KINDS:
        kinds.insert(kinds.index("tp") + 1, "fsdp2_tp")
    assert [line.split()[0] for line in without[0].splitlines()] == kinds
    assert with_hooks == without
    assert len(list(tmp_path.glob("*.ring"))) == ranks


@pytest.mark.parametrize("pure", ["", "1"], ids=["built", "pure"])
def test_calls_that_complete_after_finish_harm_nothing(
    tmp_path: Path, pure: str, library_of_process_groups: None
) -> None:
    assert outputs(LATE, str(tmp_path), pure) == ["done", "done"]
