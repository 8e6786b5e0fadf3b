"""Jobs of Kubernetes are repaired through its API: real ranks, agents, server and HTTP."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from job_page import JobPage
from kubelets import Kubelets
from kubernetes_cluster import NAMESPACE, KubernetesCluster, jobset_of
from node_agents import Agents
from training_files import TrainingFiles

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
RANK = Path(__file__).with_name("counting_rank.py")
NAME = f"jobset-{NAMESPACE}.train"


class Observed(TrainingFiles):
    """A JobSet of two ranks on four nodes, with what Paceline shows about it."""

    def __init__(self, directory: Path, cluster: KubernetesCluster, client: httpx.Client) -> None:
        super().__init__(directory)
        self.cluster, self.client = cluster, client
        self.shown = JobPage(client, NAME)

    def cordoned(self) -> set[str]:
        nodes = self.cluster.all("nodes")
        return {n["metadata"]["name"] for n in nodes if n["spec"].get("unschedulable")}


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/test.db"


@pytest.fixture
def observe(
    run_server: Callable[..., Any],
    start_agents: Callable[..., Agents],
    tmp_path: Path,
    wait_for: Callable[..., Any],
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
        agents = start_agents(server.url, [f"n{number}" for number in range(4)])
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
        job = Observed(directory, cluster, server.client)
        wait_for(lambda: job.shown.trains(0), "training", seconds=180.0)
        return job

    yield start
    for close in reversed(parts):
        close()


def test_a_crashed_job_is_created_again_once(
    observe: Callable[..., Observed], wait_for: Callable[..., Any]
) -> None:
    job = observe()
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    os.kill(job.pid(0), signal.SIGKILL)
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
    left_out, before = job.node(1), job.step()
    request = {"exclude_nodes": [left_out], "comment": "its NIC flaps", "checkpoint": False}
    job.client.post(f"/api/v1/jobs/{NAME}/restart", json=request).raise_for_status()
    wait_for(lambda: job.shown.trains(100), "the next run", seconds=180.0)
    assert job.cordoned() == {left_out}
    assert left_out not in (job.node(0), job.node(1))
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
    os.kill(job.pid(1), signal.SIGSTOP)
    wait_for(lambda: job.shown.trains(100), "the next run", seconds=180.0)
    assert len(job.starts()) == 4
    assert job.cordoned() == set()
    assert [(one["state"], one["lost_steps"]) for one in job.shown.restarts()] == [("done", 0)]


def test_a_restart_by_the_controller_is_not_repeated(
    observe: Callable[..., Observed], wait_for: Callable[..., Any]
) -> None:
    job = observe(maxRestarts=3)
    wait_for(lambda: job.shown.job()["step"] >= 20, "steps")
    os.kill(job.pid(0), signal.SIGKILL)
    wait_for(lambda: job.shown.trains(100), "the controller's restart", seconds=180.0)
    wait_for(lambda: [one["state"] for one in job.shown.restarts()] == ["done"], "its end")
    assert len(job.starts()) == 4
    assert job.cluster.writes == []
