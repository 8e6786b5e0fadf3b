"""One of two gloo ranks that call every kind of function once. Each scenario is one step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as imported_by_name

import paceline
from paceline import Op

FLOATS = 1000

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
mesh = dist.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
made_before = dist.P2POp(dist.isend if rank == 0 else dist.irecv, torch.zeros(FLOATS), other)
paceline.init(mesh=mesh, metadata={"made_by": "a test"})
group = dist.new_group([0, 1])
paceline.name_group(group, "pair", axis="dp")
tensor = torch.ones(FLOATS)
action = Op.FORWARD_SEND if rank == 0 else Op.FORWARD_RECV


def blocking_collectives() -> None:
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    imported_by_name(tensor, dist.ReduceOp.SUM, group)
    dist.broadcast(tensor, src=0)
    dist.all_gather([torch.zeros(FLOATS), torch.zeros(FLOATS)], tensor)
    dist.all_gather_into_tensor(torch.zeros(2 * FLOATS), tensor)
    dist.reduce_scatter_tensor(torch.zeros(FLOATS), torch.zeros(2 * FLOATS))
    share = (1 + 2 * rank) * FLOATS // 4  # rank 1 receives three times as much
    splits = [share, share], [FLOATS // 4, 3 * FLOATS // 4]
    dist.all_to_all_single(torch.zeros(2 * share), tensor, *splits)
    dist.reduce(tensor, dst=0)
    dist.gather(tensor, [torch.zeros(FLOATS)] * 2 if rank == 0 else None, dst=0)
    dist.scatter(tensor, [torch.zeros(FLOATS)] * 2 if rank == 0 else None, src=0)
    dist.barrier()


def asynchronous_collectives() -> None:
    works = [dist.all_reduce(tensor, async_op=True), dist.barrier(async_op=True)]
    assert all(isinstance(work, dist.Work) for work in works)
    works[1].wait()
    works[0].wait()


def object_collectives() -> None:
    found: list[object] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]


def plain_transfers() -> None:
    if rank == 0:
        dist.send(tensor, 1)
        dist.isend(tensor, dst=1).wait()
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        work = dist.irecv(tensor, src=0)
        assert work is not None
        work.wait()
        assert dist.recv(tensor) == 0  # from any rank


def pipelined_blocking() -> None:
    with paceline.pipelining(action, microbatch=1, chunk=2):
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)


def pipelined_waited_inside() -> None:
    with paceline.pipelining(action, microbatch=2):
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend if rank == 0 else dist.irecv, tensor, other)]
        ):
            work.wait()


def pipelined_waited_outside() -> None:
    with paceline.pipelining(action, microbatch=3):
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    with paceline.pipelining(Op.FORWARD, microbatch=4):
        dist.all_reduce(tensor)
    assert work is not None
    work.wait()


def both_ways_in_one_batch() -> None:
    with paceline.pipelining(Op.FORWARD_SEND, microbatch=5):
        operations = [
            dist.P2POp(dist.isend, tensor, other),
            dist.P2POp(dist.irecv, torch.zeros(FLOATS), other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def operation_made_before_init() -> None:
    for work in dist.batch_isend_irecv([made_before]):
        work.wait()


def another_thread() -> None:
    def collect() -> None:
        with paceline.section("elsewhere"):
            dist.all_reduce(tensor, group=group)

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()


def failing_collective() -> None:
    try:
        dist.broadcast(tensor, src=5)
    except RuntimeError:
        return
    raise AssertionError("torch accepted a rank that does not exist")


def last() -> None:
    """Do nothing: records of other threads are written at the boundary before this step."""


SCENARIOS: list[Callable[[], None]] = [
    blocking_collectives,
    asynchronous_collectives,
    object_collectives,
    plain_transfers,
    pipelined_blocking,
    pipelined_waited_inside,
    pipelined_waited_outside,
    both_ways_in_one_batch,
    operation_made_before_init,
    another_thread,
    failing_collective,
    last,
]

if __name__ == "__main__":
    for scenario in paceline.steps(SCENARIOS):
        scenario()
    paceline.finish()
    dist.destroy_process_group()
    os._exit(0)  # the mesh keeps gloo's threads alive, which may abort when the interpreter ends
