"""Two ranks that communicate by other means than plain calls; each step is a scenario.

In each scenario rank 1 comes LATE_SECONDS after rank 0, so that rank 0 must wait for it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline_wire.ring import RingReader

LATE_SECONDS = 0.3
WIDTH = 64
BUCKETS = 3  # buckets of a DistributedDataParallel model: one per layer

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
paceline.init()
batch = torch.ones(4, WIDTH)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))


def bucketed(**options: bool) -> DistributedDataParallel:
    # A bucket is closed once it exceeds the limit: one per layer, also after they are rebuilt.
    model = DistributedDataParallel(layers(), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20, **options)
    for _ in range(3):
        model(batch).sum().backward()
    return model


plain = bucketed()
static = bucketed(static_graph=True)
views = bucketed(gradient_as_bucket_view=True)
hooked = bucketed()
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
hooked(batch).sum().backward()
sharded = layers()
for layer in sharded:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
split = parallelize_module(
    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    mesh,
    {"0": ColwiseParallel(), "2": RowwiseParallel()},
)
# The first pass takes as long as a rank is late below.
split(batch).sum().backward()
if torch.__version__ >= "2.7":  # before, FSDP2 did not run on the CPU
    sharded(batch).sum().backward()
stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, torch.device("cpu"))
if torch.__version__ < "2.13":  # its first exchange sends integers and receives floats: not on gloo
    stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
schedule.step(*([batch] if rank == 0 else []), **({} if rank == 0 else {"target": batch}))


store = dist.distributed_c10d._get_default_store()
meetings = itertools.count(1)


def be_late() -> None:
    """Have rank 1 come later than rank 0; both meet at the store first, which is not recorded.

    Rank 0 communicates next: rank 1 waits until its ring shows that.
    """
    arrivals = 2 * next(meetings)
    store.add("arrivals", 1)
    while store.add("arrivals", 0) < arrivals:
        time.sleep(0.001)
    if rank == 1:
        path = Path(os.environ["PACELINE_RING_DIRECTORY"], "local.g0.r0.ring")
        with closing(RingReader(path)) as reader:
            while not any(frame.sequence for frame in reader.view().frames):
                time.sleep(0.001)
        time.sleep(LATE_SECONDS)


def backward_of(model: nn.Module) -> None:
    loss = model(batch).sum()
    be_late()
    loss.backward()


def first() -> None:
    """Do nothing: calls from before the first step are recorded in this one."""


def reducer() -> None:
    backward_of(plain)


def reducer_of_a_static_graph() -> None:
    backward_of(static)


def reducer_with_views() -> None:
    backward_of(views)


def reducer_with_a_hook() -> None:
    backward_of(hooked)


def no_sync() -> None:
    with plain.no_sync():
        plain(batch).sum().backward()


def fully_sharded() -> None:
    if torch.__version__ >= "2.7":  # before, FSDP2 did not run on the CPU
        be_late()
        sharded(batch).sum().backward()


def tensor_parallel() -> None:
    be_late()
    split(batch).sum().backward()


def functional_collective() -> None:
    be_late()
    total = functional.all_reduce(torch.ones(WIDTH), "sum", dist.group.WORLD)
    assert total.tolist() == [2.0] * WIDTH


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_sum(values: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(values * 2, "sum", dist.group.WORLD) + 1


compiled_sum(torch.ones(WIDTH))


def compiled() -> None:
    values = torch.ones(WIDTH)
    be_late()
    assert compiled_sum(values).tolist() == [5.0] * WIDTH


def coalesced() -> None:
    values = [torch.ones(WIDTH), torch.ones(WIDTH)]
    be_late()
    with dist.distributed_c10d._coalescing_manager():
        for value in values:
            dist.all_reduce(value)
    assert values[1].tolist() == [2.0] * WIDTH


def future() -> None:
    be_late()
    work = dist.all_reduce(torch.ones(WIDTH), async_op=True)
    assert work is not None
    work.get_future().wait()


def method_of_the_group() -> None:
    be_late()
    dist.group.WORLD.allreduce([torch.ones(WIDTH)]).wait()


def later_group() -> None:
    group = dist.new_group([0, 1])
    be_late()
    dist.all_reduce(torch.ones(WIDTH), group=group)


def inference() -> None:
    be_late()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(WIDTH))


def monitored_barrier() -> None:
    be_late()
    dist.monitored_barrier()


def pipeline() -> None:
    be_late()
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)


def last() -> None:
    """Do nothing: completion is polled, so the calls of the previous step are recorded by now."""


SCENARIOS: list[Callable[[], None]] = [
    first,
    reducer,
    reducer_of_a_static_graph,
    reducer_with_views,
    reducer_with_a_hook,
    no_sync,
    fully_sharded,
    tensor_parallel,
    functional_collective,
    compiled,
    coalesced,
    future,
    method_of_the_group,
    later_group,
    inference,
    monitored_barrier,
    pipeline,
    last,
]

if __name__ == "__main__":
    dist.barrier()
    for scenario in paceline.steps(SCENARIOS):
        scenario()
    paceline.finish()
    dist.destroy_process_group()
    os._exit(0)  # the mesh keeps gloo's threads alive, which may abort when the interpreter ends
