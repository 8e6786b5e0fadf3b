"""Recognized schedules of `torch.distributed.pipelining`; the scripts call nothing of Paceline."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline_wire.ring import RingError, RingReader
from paceline_wire.spans import TRANSFER_OPS, Op, unpack
from tests import forked_python
from tests.forked_python import ForkedPython
from tests.ports import free_port

STEPS = 4
WAITING = """
import signal, sys, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("gloo")
rank = dist.get_rank()
module = torch.nn.Linear(4, 4)
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss())
optimizer = torch.optim.SGD(module.parameters())
for step in range(int(sys.argv[1])):
    schedule.step(torch.ones(2, 4)) if rank == 0 else schedule.step(target=torch.ones(2, 4))
    optimizer.step()
    optimizer.zero_grad()
if rank == 1:
    signal.pause()  # never starts the next step
schedule.step(torch.ones(2, 4))
"""


ZERO_BUBBLE = """
import sys, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
modules = [torch.nn.Linear(4, 4) for _ in range(2)]
stages = [PipelineStage(each, i, 2, torch.device("cpu")) for i, each in enumerate(modules)]
schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=torch.nn.MSELoss())
optimizer = torch.optim.SGD([p for each in modules for p in each.parameters()])
for step in range(int(sys.argv[1])):
    schedule.step(torch.ones(2, 4), target=torch.ones(2, 4), losses=[])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def settings(directory: Path) -> dict[str, str]:
    own = {"PACELINE": "1", "PACELINE_JOB": "job", "PACELINE_RING_DIRECTORY": str(directory)}
    return {**os.environ, **own, "PYTHONWARNINGS": "ignore"}


def test_steps_of_a_schedule_without_calls_of_backward_end_with_its_optimizer(
    tmp_path: Path,
) -> None:
    """Zero-bubble schedules compute the gradients of inputs and weights separately."""
    finished = forked_python.run(["-c", ZERO_BUBBLE, STEPS], settings(tmp_path))
    assert finished.returncode == 0, finished.stderr
    spans = list(unpack(RingReader(tmp_path / "job.g0.r0.ring").read()))
    steps = [span.step for span in spans if span.op == Op.STEP]
    assert steps == list(range(STEPS))
    weights = [span.step for span in spans if span.op == Op.BACKWARD_WEIGHT]
    # That its optimizer ends a step is known once it repeats.
    assert set(weights) >= set(steps[2:])


def test_the_wait_for_a_lost_stage_is_on_the_state_page(tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        ForkedPython(["-c", WAITING, STEPS], settings(tmp_path) | where | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 120
        frames = []
        while not any(frame.op in TRANSFER_OPS for frame in frames):
            assert time.monotonic() < deadline, frames
            time.sleep(0.2)
            frames = frames_in_step(tmp_path / "job.g0.r0.ring", STEPS)
    finally:
        for rank in ranks:
            rank.kill()
    *enclosing, innermost = frames
    assert innermost.peer == 1
    assert innermost.sequence > 0
    assert [frame.peer for frame in enclosing] == [None] * len(enclosing)


def frames_in_step(path: Path, step: int) -> list:  # type: ignore[type-arg]
    """Return what a rank is in, once it is in this step."""
    try:
        reader = RingReader(path)
    except (RingError, OSError):
        return []
    view = reader.view()
    reader.close()
    return list(view.frames) if view.step == step else []
