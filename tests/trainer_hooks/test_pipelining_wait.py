"""A wait for the next stage names its transfer on the state page, also once its action is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from paceline_wire.ring import RingError, RingReader
from paceline_wire.spans import TRANSFER_OPS
from tests.ports import free_port

STEPS = 3
SCRIPT = """
import os, sys, torch, torch.distributed as dist
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
    sys.stdin.read()  # never starts the next step
schedule.step(torch.ones(2, 4))
"""


def test_the_wait_for_a_lost_stage_is_on_the_state_page(tmp_path: Path) -> None:
    settings = {"PACELINE": "1", "PACELINE_JOB": "job", "PACELINE_RING_DIRECTORY": str(tmp_path)}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(STEPS)],
            env={**os.environ, **settings, "RANK": str(rank), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
        )
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
            rank.communicate()
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
