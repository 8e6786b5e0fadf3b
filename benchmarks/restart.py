"""The time from the death of a rank until all ranks train again, compared with other programs.

The same script with eight gloo ranks on one machine. One rank after the other is killed (SIGKILL).
All are restarted by torchrun, by Paceline with new processes, and by Paceline with forks of a
process that has imported torch (`paceline run --preload`); with `@paceline.resilient`, only the
killed one is forked, and the others enter their function again. The time is from the kill to a step
that every rank has finished after the restart. For torchrun, the script uses a new store prefix per
restart; otherwise the new ranks would read the addresses of the dead ones from the store and fail.

NVIDIA's resiliency extension and torchft are measured in the same way (`benchmarks/peers`), each
in a virtual environment of its own. One that cannot be installed, or does not recover, has no row,
but a sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.harness.restarts import (
    RANKS,
    VICTIMS,
    NotTrainingError,
    Start,
    recovery_seconds,
)
from benchmarks.peers import resiliency_extension, torchft
from benchmarks.peers.environment import PeerError, peer_environment
from paceline_demo.cluster import GPUS_PER_NODE, Cluster

SCRIPT = """
import paceline

def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    paceline.init()
    begin = first_step()
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ["PACELINE_GENERATION"]
    gradient = torch.ones(1000)
    for step in paceline.steps(range(begin, 1_000_000), start=begin):
        time.sleep(0.05)
        dist.all_reduce(gradient)
        finished(rank, restart, step)

(paceline.resilient(train) if "--resilient" in sys.argv else train)()
"""

_KILLED = "restart of a killed rank: "


def measure() -> Iterator[Result]:
    torchrun = recovery_seconds(_torchrun, SCRIPT)
    yield Result(f"{_KILLED}torchrun", torchrun, "s")
    preload = ("--preload", "torch.distributed", "--preload", "paceline")
    renewed = _paceline(*preload, script=("--resilient",))
    ours: dict[str, tuple[Start, float | None]] = {
        "re-executed": (_paceline(), None),
        "forked (--preload)": (_paceline(*preload), 0.2 * torchrun),
        "in process (@paceline.resilient)": (renewed, 0.35),
    }
    for name, (start, goal) in ours.items():
        seconds = recovery_seconds(start, SCRIPT)
        yield Result(f"{_KILLED}{name}", seconds, "s", torchrun, goal)
    yield from _resiliency_extension(torchrun)
    yield from _torchft(torchrun)


def _resiliency_extension(torchrun: float) -> Iterator[Result]:
    peer = resiliency_extension
    try:
        with peer_environment(peer.REQUIREMENT) as programs:
            arms = {
                "ft_launcher": (peer.launcher(programs), peer.LAUNCHED),
                "inprocess.Wrapper, spare ranks": (peer.wrapper(programs), peer.WRAPPED),
                "inprocess.Wrapper, spare ranks, short intervals": (
                    peer.wrapper(programs, "--fast"),
                    peer.WRAPPED,
                ),
            }
            for name, (start, script) in arms.items():
                yield from _peer_result(f"{peer.REQUIREMENT} {name}", start, script, torchrun)
    except PeerError as error:
        _skip(peer.REQUIREMENT, error)


def _torchft(torchrun: float) -> Iterator[Result]:
    peer = torchft
    try:
        with peer_environment(peer.REQUIREMENT) as programs:
            for name, timeouts in (("", peer.DOCUMENTED), (", short timeouts", peer.SHORT)):
                start = peer.replicas(programs, timeouts)
                name = f"{peer.REQUIREMENT} all replicas{name}"
                yield from _peer_result(name, start, peer.REPLICATED, torchrun)
    except PeerError as error:
        _skip(peer.REQUIREMENT, error)


def _peer_result(name: str, start: Start, script: str, torchrun: float) -> Iterator[Result]:
    try:
        yield Result(f"{_KILLED}{name}", recovery_seconds(start, script), "s", torchrun)
    except NotTrainingError as error:
        _skip(name, error)


def _skip(name: str, error: Exception) -> None:
    print(f"{name} {error}", file=sys.stderr)


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
