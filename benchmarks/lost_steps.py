"""The complete steps that are lost when a job dies, with copies in memory and steps of one second.

Two replicas, each on a node of its own (a directory of copies each), with a state of 6 MB or 205
MB, in steps of a second in which the host waits, as for an accelerator. Both ranks are killed at a
random moment (SIGKILL), ten times. After every second kill the copies of one node are deleted, so
that its rank resumes from the other node. Lost are the steps that both ranks had finished and that
are repeated. Copies are as frequent as the default budget of 0.5% of the step time allows.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.harness import Result
from paceline_demo.cluster import free_port

TRAINING = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import paceline

directory, width = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()

def note(name, text):
    (directory / f"new-{name}").write_text(text)
    os.replace(directory / f"new-{name}", directory / name)

module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
model = nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(4, width)
state = paceline.Checkpoints(
    directory / "checkpoints", every=0, memory=True, model=model, optimizer=optimizer
)
started = None
for _ in paceline.steps(range(1_000_000), state=state):
    if started is None:
        note(f"resumed-{rank}", str(state.step))
    else:
        note(f"finished-{rank}", str(state.step))
        time.sleep(max(0.0, started + 1.0 - time.perf_counter()))
    started = time.perf_counter()
    loss = model(batch).square().mean()
    time.sleep(0.3)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WIDTHS = {"6 MB": 350, "205 MB": 2068}  # four layers with the two moments of AdamW
RANKS = 2
KILLS = 10
STEPS = (8, 14)  # between kills
SECONDS = 120.0  # until the ranks have finished these
CRASH, LOST_NODE = "a crash", "a lost node"


class Loss(NamedTuple):
    """The complete steps that one kill has cost."""

    fault: str
    steps: int


def measure() -> Iterator[Result]:
    chance = random.Random(7)
    for size, width in WIDTHS.items():
        with (
            tempfile.TemporaryDirectory() as name,
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        ):
            job = _Job(Path(name), Path(memory), width)
            losses = list(job.losses(chance))
        for fault in (CRASH, LOST_NODE):
            lost = [loss.steps for loss in losses if loss.fault == fault]
            what = f"steps of 1 s that {fault} costs, {size}"
            yield Result(f"{what}, most of {len(lost)}", max(lost), "steps", goal=1)
            yield Result(f"{what}, mean", mean(lost), "steps")


class _Job:
    """The ranks of one training, which are killed and started again."""

    def __init__(self, directory: Path, memory: Path, width: int) -> None:
        self._directory, self._memory, self._width = directory, memory, width
        self._lost_nodes = 0
        (directory / "train.py").write_text(TRAINING)

    def losses(self, chance: random.Random) -> Iterator[Loss]:
        ranks, first = self._start(), 0
        try:
            for number in range(KILLS):
                aim = first + chance.randint(*STEPS)
                self._wait(ranks, partial(self._has_finished, aim))
                time.sleep(chance.random())
                _kill(ranks)
                finished = self._finished()
                fault = LOST_NODE if number % 2 else CRASH
                if fault == LOST_NODE:
                    shutil.rmtree(self._memory_of(1))
                    self._lost_nodes += 1
                for rank in range(RANKS):
                    (self._directory / f"resumed-{rank}").unlink()
                ranks = self._start()
                self._wait(ranks, self._has_resumed)
                first = int(self._note("resumed-0"))
                yield Loss(fault, finished - first)
        finally:
            _kill(ranks)

    def _start(self) -> list[subprocess.Popen[bytes]]:
        port = free_port(0)
        return [
            subprocess.Popen(
                [sys.executable, "train.py", str(self._directory), str(self._width)],
                cwd=self._directory,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "LOCAL_WORLD_SIZE": str(RANKS),  # both nodes share the processors of this host
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "PACELINE_RING_DIRECTORY": "",
                    "PACELINE_MEMORY_DIRECTORY": str(self._memory_of(rank)),
                },
            )
            for rank in range(RANKS)
        ]

    def _memory_of(self, rank: int) -> Path:
        """Return the directory of copies of a rank's node, or of the one that replaced it."""
        return self._memory / f"node-{rank}-{self._lost_nodes if rank else 0}"

    def _note(self, name: str) -> str:
        return (self._directory / name).read_text()

    def _finished(self) -> int:
        """Return the last step that all ranks have finished."""
        names = [f"finished-{rank}" for rank in range(RANKS)]
        if not all((self._directory / name).exists() for name in names):
            return 0
        return min(int(self._note(name)) for name in names)

    def _has_finished(self, step: int) -> bool:
        return self._finished() >= step

    def _has_resumed(self) -> bool:
        return all((self._directory / f"resumed-{rank}").exists() for rank in range(RANKS))

    def _wait(self, ranks: list[subprocess.Popen[bytes]], condition: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            if any(rank.poll() is not None for rank in ranks):
                raise RuntimeError("a rank ended")
            if time.monotonic() > until:
                raise RuntimeError(f"the ranks did not train within {SECONDS:.0f} s")
            time.sleep(0.01)


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
