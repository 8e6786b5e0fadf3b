"""Jobs of Kubernetes are repaired through its API: real ranks, agents, server and HTTP."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from job_page import JobPage
from kubelets import Kubelets
from kubernetes_cluster import NAMESPACE, KubernetesCluster, jobset_of
from node_agents import Agents

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
RANK = Path(__file__).with_name("counting_rank.py")
NAME = f"jobset-{NAMESPACE}.train"


class Observed(NamedTuple):
    """A JobSet of two ranks on four nodes, with what Paceline shows about it."""

    cluster: KubernetesCluster
    shown: JobPage
    post: Callable[..., Any]
    directory: Path

    def starts(self) -> list[list[str]]:
        """Return (run, rank, node, pid) of each start of a rank."""
        return [line.split() for line in (self.directory / "starts").read_text().splitlines()]

    def newest(self, rank: int) -> list[str]:
        return [start for start in self.starts() if start[1] == str(rank)][-1]

    def cordoned(self) -> set[str]:
        nodes = self.cluster.all("nodes")
        return {n["metadata"]["name"] for n in nodes if n["spec"].get("unschedulable")}


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/test.db"


@pytest.fixture
def observe(
    run_server: Callable[..., Any], tmp_path: Path, wait_for: Callable[..., Any]
) -> Iterator[Callable[..., Observed]]:
    """Return a function that starts all, and waits for the first steps of a job."""
    parts: list[Any] = []

    def start(mode: str = "auto", **policy: Any) -> Observed:
        cluster = KubernetesCluster(tmp_path)
        cluster.start()
        parts.append(cluster.close)
        server = run_server(
            launcher_mode=mode,
            kubernetes_url=cluster.url,
            kubernetes_credentials=cluster.credentials,
        )
        agents = Agents(Path(tempfile.mkdtemp(prefix="paceline-agents-")), server.url)
        parts.append(lambda: shutil.rmtree(agents.directory, ignore_errors=True))
        parts.append(agents.stop)
        for number in range(4):
            agents.start(f"n{number}")
        wait_for(agents.are_up, "the agents")
        directory = tmp_path / "job"
        directory.mkdir()
        variables = {
            "PATH": os.environ["PATH"],
            "PACELINE_RING_DIRECTORY": f"{agents.directory}/{{node}}/rings",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "TEST_RANKS": "2",
        }
        command = [sys.executable, str(RANK), str(directory), "0.1", "gloo"]
        kubelets = Kubelets(cluster, command, variables, tmp_path / "ranks.log")
        kubelets.start()
        parts.append(kubelets.close)
        cluster.put("jobsets", jobset_of(**policy))
        shown = JobPage(server.client, NAME)
        wait_for(lambda: shown.trains(0), "training", seconds=180.0)
        return Observed(cluster, shown, server.client.post, directory)

    yield start
    for close in reversed(parts):
        close()


def test_a_crashed_job_is_created_again_once(
    observe: Callable[..., Observed], wait_for: Callable[..., Any]
) -> None:
    job = observe()
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    os.kill(int(job.newest(0)[3]), signal.SIGKILL)
    wait_for(lambda: job.shown.trains(100), "the next run", seconds=180.0)
    assert job.cluster.writes.count("create jobsets") == 1
    assert len(job.starts()) == 4
    (action,) = job.shown.restarts()
    assert action["state"] == "done"
    assert action["lost_steps"] <= 1
    assert action["resumed_step"] >= 19


@pytest.mark.parametrize("strategy", ["Recreate", "InPlaceRestart"])
def test_a_person_requests_a_restart_without_a_node(
    observe: Callable[..., Observed], wait_for: Callable[..., Any], strategy: str
) -> None:
    job = observe("approve", maxRestarts=3, restartStrategy=strategy)
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    left_out, before = job.newest(1)[2], int((job.directory / "step").read_text())
    request = {"exclude_nodes": [left_out], "comment": "its NIC flaps", "checkpoint": False}
    job.post(f"/api/v1/jobs/{NAME}/restart", json=request).raise_for_status()
    wait_for(lambda: job.shown.trains(100), "the next run", seconds=180.0)
    assert job.cordoned() == {left_out}
    assert left_out not in (job.newest(0)[2], job.newest(1)[2])
    assert len(job.starts()) == 4
    (action,) = job.shown.restarts()
    assert (action["state"], action["lost_steps"]) == ("done", 0)
    assert action["resumed_step"] >= before


def test_a_hung_job_is_restarted_once(
    observe: Callable[..., Observed], wait_for: Callable[..., Any]
) -> None:
    """A stopped process is no sign of a bad node."""
    job = observe(maxRestarts=3)
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    os.kill(int(job.newest(1)[3]), signal.SIGSTOP)
    wait_for(lambda: job.shown.trains(100), "the next run", seconds=180.0)
    assert len(job.starts()) == 4
    assert job.cordoned() == set()
    assert [(one["state"], one["lost_steps"]) for one in job.shown.restarts()] == [("done", 0)]


def test_a_restart_by_the_controller_is_not_repeated(
    observe: Callable[..., Observed], wait_for: Callable[..., Any]
) -> None:
    job = observe(maxRestarts=3)
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    os.kill(int(job.newest(0)[3]), signal.SIGKILL)
    wait_for(lambda: job.shown.trains(100), "the controller's restart", seconds=180.0)
    wait_for(lambda: [one["state"] for one in job.shown.restarts()] == ["done"], "its end")
    assert len(job.starts()) == 4
    assert job.cluster.writes == []
