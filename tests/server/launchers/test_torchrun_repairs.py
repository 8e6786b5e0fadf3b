"""Jobs of real torchrun processes are repaired through torchrun: real ranks, agents, server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_page import JobPage
from node_agents import Agents
from training_files import TrainingFiles

from tests.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
RANK = Path(__file__).with_name("torchrun_rank.py")


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/test.db"


class Torchruns(TrainingFiles):
    """One torchrun per node, which form one job."""

    def __init__(
        self, agents: Agents, directory: Path, nodes: list[str], nnodes: str, restarts: int
    ) -> None:
        super().__init__(directory)
        self.agents, self.nodes = agents, nodes
        self.name = "torchrun-test"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        port = free_port()
        for node in nodes:
            with (directory / f"{node}.log").open("wb") as log:
                self.processes[node] = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "torch.distributed.run"),
                        f"--nnodes={nnodes}",
                        *("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=test"),
                        f"--rdzv-endpoint=127.0.0.1:{port}",
                        f"--rdzv-conf=is_host={int(node == nodes[0])},last_call_timeout=3",
                        f"--max-restarts={restarts}",
                        *(str(RANK), str(directory), "0.1"),
                    ],
                    env={
                        **os.environ,
                        "PACELINE": "1",
                        "PACELINE_RING_DIRECTORY": str(agents.directory / node / "rings"),
                        "TEST_NODE": node,
                        "OMP_NUM_THREADS": "1",
                        # Otherwise ranks connect to addresses of dead ones (deploy/README.md).
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for start in self.starts():
            with contextlib.suppress(OSError):
                if os.fsencode(self.directory) in Path(f"/proc/{start[3]}/cmdline").read_bytes():
                    os.kill(int(start[3]), signal.SIGKILL)


@pytest.fixture
def train(
    start_agents: Callable[..., Agents], tmp_path: Path, wait_for: Callable[..., Any]
) -> Iterator[Callable[..., tuple[Torchruns, Any]]]:
    """Return a function that starts agents and a job with its ranks training on a server."""
    started: list[Torchruns] = []

    def start(
        server: Any, *nodes: str, nnodes: str = "1", restarts: int = 3
    ) -> tuple[Torchruns, JobPage]:
        agents = start_agents(server.url, nodes)
        job = Torchruns(agents, tmp_path, list(nodes), nnodes, restarts)
        started.append(job)
        shown = JobPage(server.client, job.name)
        wait_for(lambda: shown.trains(0), "training", seconds=400.0)
        return job, shown

    yield start
    for job in started:
        job.close()


def test_a_hung_rank_is_repaired_once_and_the_job_continues_from_its_checkpoint(
    run_server: Callable[..., Any],
    train: Callable[..., tuple[Torchruns, JobPage]],
    wait_for: Callable[..., Any],
) -> None:
    server = run_server(launcher_mode="auto")
    job, shown = train(server, "n0")
    wait_for(lambda: job.step() > 10, "steps")
    os.kill(job.pid(1), signal.SIGSTOP)
    wait_for(lambda: shown.trains(1), "the next generation", seconds=400.0)
    wait_for(lambda: shown.restarts()[0]["state"] == "done", "the end of the action")
    (action,) = shown.restarts()
    assert "SIGSTOP" in action["reason"]
    starts = job.starts()
    assert [start[:2] for start in starts[:2]] == [["0", starts[0][1]], ["0", starts[1][1]]]
    assert sorted(start[0] for start in starts) == ["0", "0", "1", "1"], "started once more"
    assert all(int(start[4]) > 10 for start in starts[2:]), "they continue from the checkpoint"
    assert job.processes["n0"].poll() is None, "torchrun itself runs on"


def test_a_crash_that_torchrun_repairs_itself_is_not_repaired_twice(
    run_server: Callable[..., Any],
    train: Callable[..., tuple[Torchruns, JobPage]],
    wait_for: Callable[..., Any],
) -> None:
    server = run_server(launcher_mode="auto")
    job, shown = train(server, "n0")
    os.kill(job.pid(1), signal.SIGKILL)
    wait_for(lambda: shown.trains(1), "the next generation", seconds=400.0)
    wait_for(lambda: job.step() > 20, "steps")
    assert shown.job()["generation"] == 1
    assert sorted(start[0] for start in job.starts()) == ["0", "0", "1", "1"]


def test_when_max_restarts_are_used_up_that_is_the_reason_and_nothing_is_done(
    run_server: Callable[..., Any],
    train: Callable[..., tuple[Torchruns, JobPage]],
    wait_for: Callable[..., Any],
) -> None:
    server = run_server(launcher_mode="auto")
    job, shown = train(server, "n0", restarts=1)
    os.kill(job.pid(1), signal.SIGSTOP)
    wait_for(lambda: shown.trains(1), "the next generation", seconds=400.0)
    pid = job.pid(1)
    os.kill(pid, signal.SIGSTOP)
    wait_for(
        lambda: any("is used up on n0" in (one["error"] or "") for one in shown.restarts()),
        "the reason",
        seconds=400.0,
    )
    assert len(job.starts()) == 4
    os.kill(pid, signal.SIGCONT)  # it still exists
    assert job.processes["n0"].poll() is None


def test_two_nodes_restart_together_once(
    run_server: Callable[..., Any],
    train: Callable[..., tuple[Torchruns, JobPage]],
    wait_for: Callable[..., Any],
) -> None:
    server = run_server(launcher_mode="auto")
    job, shown = train(server, "n0", "n1", nnodes="2")
    os.kill(job.pid(3), signal.SIGSTOP)
    wait_for(lambda: shown.trains(1), "the next generation", seconds=400.0)
    wait_for(lambda: shown.restarts()[0]["state"] == "done", "the end of the action")
    assert len(shown.restarts()) == 1
    assert len(job.starts()) == 8, "each rank was started once more"
