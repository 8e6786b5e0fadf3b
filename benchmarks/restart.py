"""The time from the death of a rank until all ranks train again, compared with torchrun.

The same script with four gloo ranks on one machine. One rank after the other is killed (SIGKILL),
and all are restarted: by torchrun, by Paceline with new processes, and by Paceline with forks of a
process that has imported torch (`paceline run --preload`). The time is from the kill to a finished
step of every new rank. For torchrun, the script uses a new store prefix per restart; otherwise the
new ranks would read the addresses of the dead ones from the store and fail.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.harness import Result
from paceline_demo.cluster import GPUS_PER_NODE, Cluster

RANKS = 4
VICTIMS = (1, 2, 3)
STEPS_BETWEEN = 100  # each 50 ms or more
LONGEST_SECONDS = 120.0

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import paceline

directory = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
paceline.init()
begin = int((directory / "step").read_text()) if (directory / "step").exists() else 0
gradient = torch.ones(1000)
for step in paceline.steps(range(begin, 1_000_000)):
    time.sleep(0.05)
    dist.all_reduce(gradient)
    (directory / f"new-{rank}").write_text(f"{os.getpid()} {step}")
    os.replace(directory / f"new-{rank}", directory / f"rank-{rank}")
    if rank == 0:
        (directory / "new").write_text(str(step))
        os.replace(directory / "new", directory / "step")
"""


Start = Callable[[Path], AbstractContextManager[None]]


def measure() -> Iterator[Result]:
    torchrun = _seconds(_torchrun)
    executed = _seconds(_paceline())
    forked = _seconds(_paceline("--preload", "torch.distributed"))
    yield Result("restart of a killed rank: torchrun", torchrun, "s")
    yield Result("restart of a killed rank: re-executed", executed, "s", torchrun)
    yield Result("restart of a killed rank: forked (--preload)", forked, "s", torchrun)


def _seconds(start: Start) -> float:
    """Return the median restart time of a few kills in one job."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(SCRIPT)
        with start(directory):
            seen = [_kill(directory, victim) for victim in VICTIMS]
    return median(seen)


def _kill(directory: Path, victim: int) -> float:
    """Let the job train for a while, kill a rank, and wait for a step of the new ranks."""
    first = _ranks(directory, lambda _: True)
    aim = max(step for _, step in first.values()) + STEPS_BETWEEN
    old = _ranks(directory, lambda ranks: min(step for _, step in ranks.values()) >= aim)
    killed = time.monotonic()
    os.kill(old[victim][0], signal.SIGKILL)
    pids = {pid for pid, _ in old.values()}
    _ranks(directory, lambda ranks: not any(pid in pids for pid, _ in ranks.values()))
    return time.monotonic() - killed


def _ranks(
    directory: Path, are: Callable[[dict[int, tuple[int, int]]], bool]
) -> dict[int, tuple[int, int]]:
    """Return pid and last step of each rank, once they satisfy the condition."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        ranks = {}
        for file in directory.glob("rank-*"):
            pid, step = file.read_text().split()
            ranks[int(file.name.removeprefix("rank-"))] = int(pid), int(step)
        if len(ranks) == RANKS and are(ranks):
            return ranks
        time.sleep(0.01)
    raise RuntimeError(f"the ranks did not train again within {LONGEST_SECONDS:.0f} s")


@contextmanager
def _torchrun(directory: Path) -> Iterator[None]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--max-restarts", str(len(VICTIMS))),
        *(str(directory / "train.py"), str(directory)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PACELINE_RING_DIRECTORY": "",  # the hooks are inert
    }
    with (directory / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield
    finally:
        running.terminate()
        running.wait()


def _paceline(*options: str) -> Start:
    @contextmanager
    def start(directory: Path) -> Iterator[None]:
        cluster = Cluster(RANKS // GPUS_PER_NODE, 0)
        try:
            cluster.start()
            command = [
                *(sys.executable, "-m", "paceline_cli", "run", "--server", cluster.url),
                *("--dp", str(RANKS), "--detach", *options, "--"),
                *(sys.executable, "train.py", str(directory)),
            ]
            subprocess.run(command, cwd=directory, check=True, capture_output=True)
            yield
        finally:
            cluster.close()
            cluster.remove_logs()

    return start
