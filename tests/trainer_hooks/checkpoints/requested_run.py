"""A training of two ranks that follows requests: by `Checkpoints`, a function or a loop of its own.

    python requested_run.py MODE DIRECTORY [BATCHES]

It prints the number of completed steps at its end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline

mode, directory = sys.argv[1], Path(sys.argv[2])
batches = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
torch.set_num_threads(1)
dist.init_process_group("gloo")
paceline.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
loader = [torch.ones(2, 4)] * batches


def train(batch: Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.001 * dist.get_rank())


def with_checkpoints() -> int:
    state = paceline.Checkpoints(directory, every=0, model=model, optimizer=optimizer)
    for batch in paceline.steps(loader, state=state):
        train(batch)
    assert state.stopped == paceline.should_stop()
    return state.step


def accumulating() -> int:
    """Train with two batches per step."""
    state = paceline.Checkpoints(directory, every=0, model=model, optimizer=optimizer)
    for number, batch in enumerate(paceline.steps(loader, state=state)):
        model(batch).sum().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return state.step


class SlowWriter(dcp.FileSystemWriter):
    """Writes in a thread for longer than a few steps take."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(1.0)
        super().finish(*args, **kwargs)


def saving_function() -> int:
    """Train with two batches per step, from step 100 on; save by an asynchronous function."""
    group = dist.new_group(backend="gloo")
    taken = 0

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.async_save(
            state | {"batches": torch.tensor(taken)},
            storage_writer=SlowWriter(directory / f"step-{step}"),
            process_group=group,
        )

    for epoch in range(100_000):
        start = None if epoch else 100
        for batch in paceline.steps(loader[:6], start=start, save=save):
            model(batch).sum().backward()
            taken += 1
            if taken % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
        if paceline.should_stop():
            assert [*paceline.steps(loader, save=save)] == [], "there is no further epoch"
            break
    return 100 + taken // 2


def own_loop() -> int:
    """Save with torch.save on rank 0."""
    step = 0
    for batch in paceline.steps(loader):
        train(batch)
        step += 1
        if paceline.should_checkpoint() and dist.get_rank() == 0:
            torch.save({"step": step, "model": model.state_dict()}, directory / "saved.pt")
            paceline.checkpoint_saved(step)
        if paceline.should_stop():
            break
    return step


def failing_loop() -> int:
    """Fail to save once: then the others must not stop either."""
    step = failures = 0
    for batch in paceline.steps(loader):
        train(batch)
        step += 1
        if paceline.should_checkpoint() and dist.get_rank() == 0:
            failures += 1
            if failures == 1:
                paceline.checkpoint_failed("no space left")
            else:
                paceline.checkpoint_saved(step)
        if paceline.should_stop():
            break
    return step


modes = {
    "checkpoints": with_checkpoints,
    "accumulating": accumulating,
    "own_loop": own_loop,
    "saving_function": saving_function,
    "failing_loop": failing_loop,
}
print("ended after", modes[mode](), flush=True)
dist.destroy_process_group()
