"""NCCL in a group of one rank, and one step of the trainer, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paceline_wire.ring import RingReader
from paceline_wire.spans import Flag, Op, Span, unpack

COLLECTIVES = """
import os, torch, torch.distributed as dist
import paceline
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1,
                        device_id=torch.device("cuda", 0))
paceline.init()
tensor, group = torch.ones(1000, device="cuda"), dist.group.WORLD
for step in paceline.steps(range(4)):
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    gathered = torch.zeros(1000, device="cuda")
    dist.all_gather_into_tensor(gathered, tensor)
    dist.barrier()
    group._start_coalescing(tensor.device)
    dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor, async_op=True)
    group._end_coalescing(tensor.device).wait()
    torch.cuda.synchronize()
paceline.finish()
dist.destroy_process_group()
"""

CAPTURED = """
import torch, torch.distributed as dist
import paceline
from paceline import hooks
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1,
                        device_id=torch.device("cuda", 0))
paceline.init()
assert type(hooks._session.process_groups).__name__ == "NativeRecorder"
tensor, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
for step in paceline.steps(range(6)):
    work = dist.all_reduce(tensor, async_op=True)  # in flight when the capture begins
    if step == 3:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
            other = dist.all_reduce(tensor, async_op=True)
            other.wait()
            doubled = tensor * 2
    work.wait()
    if step >= 3:
        graph.replay()
    torch.cuda.synchronize()
assert doubled.tolist() == [2.0] * 8
paceline.finish()
dist.destroy_process_group()
"""


def run(arguments: list[str], directory: Path) -> list[Span]:
    finished = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PACELINE_RING_DIRECTORY": str(directory), "PACELINE_JOB": "local"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert finished.returncode == 0, finished.stderr
    return list(unpack(RingReader(directory / "local.g0.r0.ring").read()))


def test_collectives_are_timed_on_the_device(tmp_path: Path) -> None:
    spans = run(["-c", COLLECTIVES], tmp_path)
    # From the second step on, because the hooks detect a device at the first boundary after its
    # first use.
    second = [span for span in spans if span.step == 2]
    reduced = [span for span in second if span.op == Op.ALL_REDUCE]
    assert {span.bytes for span in reduced} == {4000}
    assert all(span.flags & Flag.DEVICE for span in reduced)
    first = min(span.sequence for span in reduced)
    batch = [span for span in reduced if span.sequence >= first + 2]
    assert len([span for span in batch if span.flags & Flag.ASYNC]) == 2
    reduced = [span for span in reduced if span.sequence < first + 2]
    blocking = [span for span in reduced if span.flags == Flag.DEVICE]
    launched = [span for span in reduced if span.flags & Flag.ASYNC]
    assert len(blocking) == len(launched) == 1
    assert launched[0].sequence == blocking[0].sequence + 1
    assert [span.op for span in second].count(Op.ALL_GATHER) == 1
    assert [span.op for span in second].count(Op.BARRIER) == 1


def test_a_captured_collective_replays(tmp_path: Path) -> None:
    spans = run(["-c", CAPTURED], tmp_path)
    reduced = [span for span in spans if span.op == Op.ALL_REDUCE]
    assert any(span.flags & Flag.DEVICE for span in reduced), "those outside of the capture"
    assert any(not span.flags & Flag.DEVICE for span in reduced), "those in the capture"


def test_the_reference_trainer_is_timed_on_the_device(tmp_path: Path) -> None:
    options = ["--steps", "4", "--device", "cuda", "--global-batch-size", "8"]
    spans = run(["-m", "paceline_trainer", *options], tmp_path)
    assert [span.step for span in spans if span.op == Op.STEP] == [0, 1, 2, 3]
    for op in (Op.FORWARD, Op.BACKWARD):
        timed = [span for span in spans if span.op == op and span.step == 1]
        assert sorted({span.microbatch for span in timed}) == [0, 1, 2, 3]
        assert all(span.flags & Flag.DEVICE and span.duration_ns > 0 for span in timed)
