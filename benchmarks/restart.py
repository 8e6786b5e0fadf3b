"""The time from the death of a rank until all ranks train again, compared with torchrun.

The same script with eight gloo ranks on one machine. One rank after the other is killed (SIGKILL).
All are restarted by torchrun, by Paceline with new processes, and by Paceline with forks of a
process that has imported torch (`paceline run --preload`); with `@paceline.resilient`, only the
killed one is forked, and the others enter their function again. The time is from the kill to a step
that every rank has finished after the restart. For torchrun, the script uses a new store prefix per
restart; otherwise the new ranks would read the addresses of the dead ones from the store and fail.
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
from typing import NamedTuple

from benchmarks.harness import Result
from paceline_demo.cluster import GPUS_PER_NODE, Cluster

RANKS = 8
VICTIMS = (1, 2, 4, 6, 7)  # a node that is to blame for three is no longer used
STEPS_BETWEEN = 40  # each 50 ms or more
LONGEST_SECONDS = 120.0

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import paceline

directory = Path(sys.argv[1])
torch.set_num_threads(1)

def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    paceline.init()
    begin = int((directory / "step").read_text()) if (directory / "step").exists() else 0
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ["PACELINE_GENERATION"]
    gradient = torch.ones(1000)
    for step in paceline.steps(range(begin, 1_000_000), start=begin):
        time.sleep(0.05)
        dist.all_reduce(gradient)
        (directory / f"new-{rank}").write_text(f"{restart} {os.getpid()} {step}")
        os.replace(directory / f"new-{rank}", directory / f"rank-{rank}")
        if rank == 0:
            (directory / "new").write_text(str(step))
            os.replace(directory / "new", directory / "step")

(paceline.resilient(train) if "--resilient" in sys.argv else train)()
"""


Start = Callable[[Path], AbstractContextManager[None]]


class Seen(NamedTuple):
    """A finished step of a rank."""

    restart: int  # number of the restart, or generation
    pid: int
    step: int


def measure() -> Iterator[Result]:
    torchrun = _seconds(_torchrun)
    executed = _seconds(_paceline())
    preload = ("--preload", "torch.distributed", "--preload", "paceline")
    forked = _seconds(_paceline(*preload))
    renewed = _seconds(_paceline(*preload, script=("--resilient",)))
    yield Result("restart of a killed rank: torchrun", torchrun, "s")
    yield Result("restart of a killed rank: re-executed", executed, "s", torchrun)
    yield Result("restart of a killed rank: forked (--preload)", forked, "s", torchrun)
    name = "restart of a killed rank: in process (@paceline.resilient)"
    yield Result(name, renewed, "s", torchrun, goal=0.35)


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
    aim = max(seen.step for seen in first.values()) + STEPS_BETWEEN
    old = _ranks(directory, lambda ranks: min(seen.step for seen in ranks.values()) >= aim)
    killed = time.monotonic()
    os.kill(old[victim].pid, signal.SIGKILL)
    before = max(seen.restart for seen in old.values())
    _ranks(directory, lambda ranks: all(seen.restart > before for seen in ranks.values()))
    return time.monotonic() - killed


def _ranks(directory: Path, are: Callable[[dict[int, Seen]], bool]) -> dict[int, Seen]:
    """Return what each rank has written last, once they satisfy the condition."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        ranks = {}
        for file in directory.glob("rank-*"):
            seen = Seen(*map(int, file.read_text().split()))
            ranks[int(file.name.removeprefix("rank-"))] = seen
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


def _paceline(*options: str, script: tuple[str, ...] = ()) -> Start:
    @contextmanager
    def start(directory: Path) -> Iterator[None]:
        cluster = Cluster(RANKS // GPUS_PER_NODE, 0)
        try:
            cluster.start()
            command = [
                *(sys.executable, "-m", "paceline_cli", "run", "--server", cluster.url),
                *("--dp", str(RANKS), "--detach", "--policy", "mode=auto", *options, "--"),
                *(sys.executable, "train.py", str(directory), *script),
            ]
            subprocess.run(command, cwd=directory, check=True, capture_output=True)
            yield
        finally:
            cluster.close()
            cluster.remove_logs()

    return start
