"""A training on a GPU that is killed and resumes: the same weights, losses and random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
from torch import nn
import paceline
torch.manual_seed(7)
torch.use_deterministic_algorithms(True)
model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=4, shuffle=True)
state = paceline.Checkpoints(sys.argv[1], every=5, model=model, optimizer=optimizer, loader=loader)
kill_at = int(sys.argv[2])
paceline.init()
for batch in paceline.steps(loader, state=state):
    loss = model(batch.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(state.step, loss.item().hex(), flush=True)
    if state.step == kill_at:
        os.kill(os.getpid(), 9)
print("weights", sum(p.detach().double().sum().item() for p in model.parameters()).hex())
"""


def train(directory: Path, kill_at: int, *, memory: bool) -> list[str]:
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PACELINE_RING_DIRECTORY": ""}
    if memory:
        settings["PACELINE_MEMORY_DIRECTORY"] = str(directory / "memory")
        (directory / "memory").mkdir(exist_ok=True)
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory / "checkpoints"), str(kill_at)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == (0 if kill_at < 0 else -9), finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.parametrize("memory", [False, True])
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, *, memory: bool) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = train(whole, -1, memory=memory)
    assert len(expected) == 101
    first = train(broken, 33, memory=memory)
    second = train(broken, 71, memory=memory)
    third = train(broken, -1, memory=memory)
    assert first[0] not in second, "the run began again"
    assert second[0] not in third, "the run began again"
    for lines in (first, second, third):
        assert set(lines) <= set(expected)
    assert third[-1] == expected[-1]
