"""NVIDIA's resiliency extension: its launcher, and its wrapper that restarts in the process.

The launcher (`ft_launcher`) is torchrun with monitors of its ranks: it restarts all of them in new
processes. The wrapper keeps the processes, and replaces a dead rank by one that was started with
the others and waits: there are as many of these as kills. All use the documented defaults; the
wrapper once more with the shortest intervals with which it recovered. It cannot end a collective
of gloo: ranks that are no neighbors of the dead one leave at the timeout of the process group,
which is 10 s in its examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.restarts import RANKS, VICTIMS, Start
from benchmarks.peers.environment import PeerProcesses
from paceline_demo.cluster import free_port

REQUIREMENT = "nvidia-resiliency-ext==0.4.1"

LAUNCHED = """
dist.init_process_group("gloo")
rank = dist.get_rank()
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
gradient = torch.ones(1000)
for step in range(first_step(), 1_000_000):
    time.sleep(0.05)
    dist.all_reduce(gradient)
    finished(rank, restart, step)
"""

# Rank 0, which is never killed, holds both stores.
WRAPPED = """
import datetime
from nvidia_resiliency_ext import inprocess

is_holder = os.environ["RANK"] == "0"
stores = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=is_holder)
is_fast = "--fast" in sys.argv
collective = datetime.timedelta(seconds=1 if is_fast else 10)
short = datetime.timedelta(milliseconds=20)
settings = {} if not is_fast else {
    "monitor_thread_interval": short,
    "monitor_process_interval": short,
    "heartbeat_interval": short,
    "progress_watchdog_interval": short,
    "last_call_wait": datetime.timedelta(0),
}

@inprocess.Wrapper(
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(int(sys.argv[2])),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    **settings,
)
def train(wrapper: inprocess.CallWrapper = None):
    store = dist.PrefixStore(f"train-{wrapper.iteration}", stores)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=collective
    )
    gradient = torch.ones(1000)
    for step in range(first_step(), 1_000_000):
        time.sleep(0.05)
        dist.all_reduce(gradient)
        finished(rank, wrapper.iteration, step)

train()
"""


def launcher(programs: Path) -> Start:
    """Return how to start `LAUNCHED` with `ft_launcher`."""

    @contextmanager
    def start(directory: Path) -> Iterator[None]:
        processes = PeerProcesses(directory)
        try:
            processes.start(
                *(str(programs / "python"), "-m"),
                "nvidia_resiliency_ext.fault_tolerance.launcher",
                *("--standalone", "--nproc-per-node", str(RANKS)),
                *("--max-restarts", str(len(VICTIMS)), "--ft-enable-nic-monitor", "false"),
                *(str(directory / "train.py"), str(directory)),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
            yield
        finally:
            processes.close()

    return start


def wrapper(programs: Path, *options: str) -> Start:
    """Return how to start `WRAPPED`: its ranks, and those that wait."""

    @contextmanager
    def start(directory: Path) -> Iterator[None]:
        processes = PeerProcesses(directory)
        ports = free_port(0), free_port(0)
        count = RANKS + len(VICTIMS)
        try:
            for rank in range(count):
                processes.start(
                    *(str(programs / "python"), str(directory / "train.py")),
                    *(str(directory), str(RANKS), *options),
                    RANK=str(rank),
                    WORLD_SIZE=str(count),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(ports[0]),
                    STORE_PORT=str(ports[1]),
                )
            yield
        finally:
            processes.close()

    return start
