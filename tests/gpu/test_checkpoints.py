"""A training on a GPU that is killed and resumes: the same weights, losses and random numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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

# The device is behind the host. The sums of the state after each step are printed at the end.
LARGE = """
import os, sys, time, torch
from torch import nn
import paceline
from paceline.checkpoints.memory import device
directory, last, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(7)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)), nn.BatchNorm1d(2048)).cuda()
capturable = how == "graph"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=capturable)
state = paceline.Checkpoints(directory, every=0, model=model, optimizer=optimizer)
inputs = torch.randn(512, 2048, device="cuda")
graph, graphs, sums = None, [], []

def train():
    model(inputs).square().mean().backward()
    optimizer.step()

def total():
    tensors = [*model.state_dict().values()]
    tensors += [value for one in optimizer.state.values() for value in one.values()]
    tensors = [each for each in tensors if each.is_cuda]
    return sum(each.double().sum() * (n + 1) for n, each in enumerate(tensors))

for number in paceline.steps(range(1000), state=state):
    sums.append((state.step, total()))
    if state.step == last:
        break
    if number == 1:  # kernels are loaded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    if how == "changes" and state.step == 4:
        optimizer.state[model[5].weight]["exp_avg_sq"].data.mul_(0.5)
    if how == "graph" and number > 4 and number % 2:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graphs.append(graph)
        with torch.cuda.graph(graph):
            train()
        torch.cuda.set_sync_debug_mode("error")
    if graph is None:
        optimizer.zero_grad(set_to_none=not capturable)
        train()
    else:
        graph.replay()
    for stream in device._streams.values() if how != "graph" else ():  # the next copy begins later
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 26)
    if not state._copies._slots:
        time.sleep(0.3)
torch.cuda.set_sync_debug_mode("default")
while state._copies._is_writing:
    time.sleep(0.01)
print("resumed", state.resumed_from, state.resumed_step)
for step, value in sums:
    print(step, value.item().hex())
print("skipped", state._copies.skipped, "off", state._copies.is_off)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Copies go to real shared memory: the pages of other files cannot be locked for a GPU."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield {"PACELINE_MEMORY_DIRECTORY": directory, "PACELINE_MEMORY_OVERHEAD": "1000"}


def run(
    script: str, directory: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    own = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PACELINE_RING_DIRECTORY": ""}
    return subprocess.run(
        [sys.executable, "-c", script, str(directory), *arguments],
        env=os.environ | own | settings,
        capture_output=True,
        text=True,
        timeout=100,
    )


def train(directory: Path, kill_at: int, settings: dict[str, str]) -> list[str]:
    finished = run(SCRIPT, directory, str(kill_at), **settings)
    assert finished.returncode == (0 if kill_at < 0 else -9), finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.parametrize("copies", [False, True])
def test_a_run_that_is_killed_ends_as_one_that_is_not(
    tmp_path: Path, memory: dict[str, str], *, copies: bool
) -> None:
    settings = memory if copies else {}
    expected = train(tmp_path / "whole", -1, settings)
    assert len(expected) == 101
    first = train(tmp_path / "broken", 33, settings)
    second = train(tmp_path / "broken", 71, settings)
    third = train(tmp_path / "broken", -1, settings)
    assert first[0] not in second, "the run began again"
    assert second[0] not in third, "the run began again"
    for lines in (first, second, third):
        assert set(lines) <= set(expected)
    assert third[-1] == expected[-1]


@pytest.mark.parametrize("how", ["steps at once", "graph", "changes"])
def test_the_host_never_waits_for_a_copy_that_is_exact(
    how: str, tmp_path: Path, memory: dict[str, str]
) -> None:
    first = run(LARGE, tmp_path, "33", how, **memory)
    assert first.returncode == -9, first.stderr
    assert "off False" in first.stdout, first.stderr
    assert ("is discarded" in first.stderr) == (how == "changes"), first.stderr
    second = run(LARGE, tmp_path, "40", how, **memory)
    resumed = re.match(r"resumed memory (\d+)\n\1 (.*)", second.stdout)
    assert resumed, (first.stdout, second.stdout, second.stderr)
    assert f"\n{resumed[1]} {resumed[2]}\n" in first.stdout
