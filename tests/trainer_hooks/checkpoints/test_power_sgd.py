"""PowerSGD continues after a resume with what each rank has not sent yet."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import paceline


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model_and_hook(passes: int) -> tuple[DistributedDataParallel, PowerSGDState]:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = DistributedDataParallel(layers)
    hook = PowerSGDState(None, start_powerSGD_iter=4, min_compression_rate=1)
    model.register_comm_hook(hook, powerSGD_hook)
    for _ in range(passes):
        model(torch.zeros(1, 8)).sum().backward()
        model.zero_grad()
    return model, hook


def _run(directory: Path, steps: int) -> list[float]:
    model, hook = _model_and_hook(passes=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state = paceline.Checkpoints(
        directory, every=0, memory=False, hook=hook, model=model, optimizer=optimizer
    )
    losses = []
    for batch in paceline.steps(torch.linspace(-1, 1, 96).view(12, 1, 8), state=state):
        loss = model(batch).sub(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == steps:
            state.save()
            state.wait()
            break
    return losses


def test_the_losses_of_an_interrupted_run_are_those_of_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole = _run(tmp_path / "whole", 12)
    assert _run(tmp_path / "broken", 7) + _run(tmp_path / "broken", 12) == whole


def test_a_state_whose_buckets_will_change_is_refused(tmp_path: Path) -> None:
    model, hook = _model_and_hook(passes=0)
    with pytest.raises(ValueError, match="forward and backward twice"):
        paceline.Checkpoints(tmp_path, memory=False, model=model, hook=hook)


def test_a_state_of_no_model_is_refused(tmp_path: Path) -> None:
    _, hook = _model_and_hook(passes=2)
    with pytest.raises(TypeError, match="of no DistributedDataParallel in this state"):
        paceline.Checkpoints(tmp_path, memory=False, hook=hook)
