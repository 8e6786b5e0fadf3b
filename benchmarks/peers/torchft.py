"""torchft: each rank is a replica group of its own, coordinated by a lighthouse.

The other replicas continue without the dead one, which this benchmark starts again at once, in a
new process; it then gets its state from another replica. A step counts once it is committed with
all replicas. The lighthouse's options are those of its README, the timeouts those of its example
`train_ddp.py`; once more with the shortest ones with which it recovered.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.restarts import RANKS, Start
from benchmarks.peers.environment import PeerProcesses
from paceline_demo.cluster import free_port

REQUIREMENT = "torchft==0.2.0"


class Timeouts(NamedTuple):
    """How long survivors wait."""

    lighthouse: dict[str, int]  # its options
    collective_seconds: float


DOCUMENTED = Timeouts({"quorum_tick_ms": 100, "join_timeout_ms": 10_000}, 5.0)
SHORT = Timeouts({"quorum_tick_ms": 10, "join_timeout_ms": 1000, "heartbeat_timeout_ms": 1000}, 1.0)

REPLICATED = """
import datetime
from torchft import Manager, ProcessGroupGloo

rank = int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
collective = datetime.timedelta(seconds=float(sys.argv[4]))
gradient = torch.ones(1000)

def load(state):
    gradient.copy_(state["gradient"])

manager = Manager(
    pg=ProcessGroupGloo(timeout=collective),
    load_state_dict=load,
    state_dict=lambda: {"gradient": gradient},
    min_replica_size=1,
    replica_id=f"rank_{rank}",
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=datetime.timedelta(seconds=10),
)
while True:
    manager.start_quorum()
    time.sleep(0.05)
    manager.allreduce(gradient).wait()
    if manager.should_commit() and manager.num_participants() == int(sys.argv[3]):
        finished(rank, manager._quorum_id, manager.current_step())
"""


class _Replicas:
    """The processes of all replicas; one that ends is started again."""

    def __init__(
        self,
        processes: PeerProcesses,
        command: list[str],
        arguments: list[str],
        lighthouse: str,
    ) -> None:
        self._processes = processes
        self._command = command
        self._arguments = arguments
        self._lighthouse = lighthouse
        self._stop = threading.Event()
        self._running = {rank: self._start(rank) for rank in range(RANKS)}
        self._thread = threading.Thread(target=self._replace_dead, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        return self._processes.start(
            *(*self._command, str(rank), *self._arguments),
            TORCHFT_LIGHTHOUSE=self._lighthouse,
            RUST_LOG="warn",
        )

    def _replace_dead(self) -> None:
        while not self._stop.wait(0.01):
            for rank, process in self._running.items():
                if process.poll() is not None:
                    self._running[rank] = self._start(rank)


def replicas(programs: Path, timeouts: Timeouts) -> Start:
    """Return how to start `REPLICATED`, with these options of the lighthouse."""

    @contextmanager
    def start(directory: Path) -> Iterator[None]:
        processes = PeerProcesses(directory)
        address = f"127.0.0.1:{free_port(0)}"
        running = None
        try:
            options = [
                text
                for name, value in timeouts.lighthouse.items()
                for text in (f"--{name}", str(value))
            ]
            python = str(programs / "python")
            processes.start(
                *(str(programs / "torchft_lighthouse"), "--bind", address),
                *("--min_replicas", "1", *options),
            )
            command = [python, str(directory / "train.py"), str(directory)]
            arguments = [str(RANKS), str(timeouts.collective_seconds)]
            running = _Replicas(processes, command, arguments, f"http://{address}")
            yield
        finally:
            if running is not None:
                running.close()
            processes.close()

    return start
