"""Jobs of a real Slurm cluster are repaired through Slurm: real daemons, ranks, agents, server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import pytest
from job_page import JobPage
from slurm_cluster import SlurmCluster
from sqlalchemy import select
from training_files import TrainingFiles

from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.models import LaunchRow
from paceline_wire.local_token import read_token, token_path
from tests.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
RANK = Path(__file__).with_name("counting_rank.py")


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/test.db"


class SlurmTraining(TrainingFiles):
    """A batch job with one rank per node."""

    def __init__(
        self,
        slurm: SlurmCluster,
        rings: Path,
        directory: Path,
        *arguments: str,
        nodes: int = 2,
        options: str = "",
    ) -> None:
        super().__init__(directory)
        self.slurm = slurm
        script = directory / "train.sh"
        step = " ".join(["0.1", *arguments])
        script.write_text(
            f"#!/bin/bash\n#SBATCH -N{nodes} --ntasks-per-node=1 --exclusive {options}\n"
            f"#SBATCH -o {directory}/output\n"
            "export PACELINE=1\n"
            "srun --kill-on-bad-exit=1 bash -c 'TEST_RUN=${SLURM_RESTART_COUNT:-0} "
            "TEST_RANK=$SLURM_PROCID TEST_RANKS=$SLURM_NTASKS TEST_NODE=$SLURMD_NODENAME "
            f"PACELINE_RING_DIRECTORY={rings}/$SLURMD_NODENAME/rings "
            f"exec {sys.executable} {RANK} {directory} {step}'\n"
        )
        self.id = slurm.submit(script)
        self.name = f"slurm-{self.id}"

    def requeues(self) -> int:
        return int(self.slurm.job(self.id)["Restarts"])


@pytest.fixture
def train(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmTraining]]:
    started: list[SlurmTraining] = []

    def start(rings: Path, *arguments: str, nodes: int = 2, options: str = "") -> SlurmTraining:
        directory = tmp_path / f"job-{len(started)}"
        directory.mkdir()
        job = SlurmTraining(slurm, rings, directory, *arguments, nodes=nodes, options=options)
        started.append(job)
        return job

    yield start
    for job in started:
        slurm.cancel(job.id)
    for node in slurm.nodes:
        if slurm.states()[node].startswith("drain"):
            slurm.resume(node)


class Observed(NamedTuple):
    """A job that trains under Paceline."""

    server: Any
    agents: Any
    job: SlurmTraining
    shown: JobPage


@pytest.fixture
def observed(
    slurm: SlurmCluster,
    run_server: Callable[..., Any],
    start_agents: Callable[..., Any],
    train: Callable[..., SlurmTraining],
    wait_for: Callable[..., Any],
) -> Callable[..., Observed]:
    """Return a function that starts server, agents and a job, and waits for its first steps."""

    def start(*arguments: str, nodes: int = 2, options: str = "", **settings: Any) -> Observed:
        server = run_server(**{"launcher_mode": "auto", **settings})
        agents = start_agents(server.url, slurm.nodes)
        job = train(agents.directory, *arguments, nodes=nodes, options=options)
        shown = JobPage(server.client, job.name)
        wait_for(lambda: shown.trains(0), "training", seconds=180.0)
        return Observed(server, agents, job, shown)

    return start


def test_a_crashed_job_is_requeued_once(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    *_, job, shown = observed()
    os.kill(job.pid(1), signal.SIGKILL)
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    (action,) = shown.restarts()
    assert action["state"] == "done"
    assert job.requeues() == 1
    assert [start[0] for start in job.starts()] == ["0", "0", "1", "1"]
    assert slurm.job(job.id)["AdminComment"] == f"paceline:{action['id']}"


def test_a_job_that_trains_again_while_slurm_does_not_answer_is_spared(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    *_, job, shown = observed("gloo")
    with slurm.paused_controller():
        os.kill(job.pid(1), signal.SIGSTOP)
        wait_for(lambda: [one["state"] for one in shown.restarts()] == ["running"], "the restart")
        os.kill(job.pid(1), signal.SIGCONT)
        wait_for(lambda: shown.trains(0), "its withdrawal")
    os.kill(job.pid(0), signal.SIGKILL)
    wait_for(lambda: shown.trains(100), "the repair of a crash", seconds=180.0)
    assert [one["state"] for one in shown.restarts()] == ["done", "superseded"]
    assert job.requeues() == 1


def seconds_of(action: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds from the decision until Slurm ran the job again with all ranks found, and
    until each of them had finished a step."""
    times = {
        phase["name"]: datetime.fromisoformat(phase["started_at"]) for phase in action["phases"]
    }
    decided = datetime.fromisoformat(action["created_at"])
    return (
        (times["observe"] - decided).total_seconds(),
        (times["done"] - decided).total_seconds(),
    )


REPAIRS = int(os.environ.get("PACELINE_SLURM_REPAIRS", "50"))


def test_fifty_faults_are_repaired_once_each(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks are killed, and nodes go silent; a lost node is drained and excluded."""
    (tmp_path / "policy.toml").write_text("restarts_per_hour = 1000\nrestarts_per_day = 1000\n")
    server, agents, job, shown = observed(
        options="--open-mode=append", policy=tmp_path / "policy.toml"
    )
    found: list[tuple[str, float, float]] = []
    for count in range(REPAIRS):
        fault, rank = ("crash", "lost node")[count % 2], count // 2 % 2
        node = job.node(rank)
        if fault == "lost node":
            agents.kill(node)
        os.kill(job.pid(rank), signal.SIGKILL)
        wait_for(
            lambda count=count: shown.trains(100 * (count + 1)), f"repair {count}", seconds=180.0
        )
        action = shown.restarts()[0]
        assert action["state"] == "done"
        assert job.requeues() == count + 1
        # Nodes of earlier repairs may be used again.
        excluded = slurm.job(job.id)["ExcNodeList"]
        assert excluded == ",".join(action["exclude_nodes"] or ["(null)"])
        if fault == "lost node":
            assert action["exclude_nodes"] == [node]
            agents.start(node)
        for drained in action["exclude_nodes"]:
            assert drained not in (job.node(0), job.node(1))
            assert slurm.states()[drained] == "drained"
            assert action["id"] in slurm.drain_reason(drained)
            assert server.client.post(f"/api/v1/nodes/{drained}/release").is_success
            slurm.resume(drained)
        found.append((fault, *seconds_of(action)))
    assert len(job.starts()) == 2 * (REPAIRS + 1), "each repair started each rank once"
    with capsys.disabled():
        for name in ("crash", "lost node"):
            runs = sorted(run for fault, run, _ in found if fault == name)
            steps = sorted(step for fault, _, step in found if fault == name)
            print(
                f"\n{name}: {len(runs)} repaired; s from the decision until Slurm runs the job: "
                f"median {median(runs):.1f}, most {runs[-1]:.1f}; until each rank has finished a "
                f"step: median {median(steps):.1f}, most {steps[-1]:.1f}"
            )


def test_ranks_that_outlive_their_run_are_reported_and_not_mixed(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    """A killed slurmd: Slurm requeues the job while the old task runs on (split-brain)."""
    server, agents, job, shown = observed(options="--open-mode=append")
    old, node = job.pid(1), job.node(1)
    slurm.kill_node(node)
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    assert job.requeues() == 1, "Slurm's own requeue is the one that was needed"
    assert node not in (job.node(0), job.node(1))
    os.kill(old, 0)  # it still runs

    def incident() -> dict[str, Any] | None:
        items = server.client.get(f"/api/v1/incidents?job={job.name}").json()["items"]
        return next((item for item in items if item["kind"] == "earlier_run"), None)

    found = wait_for(incident, "the incident about the old rank")
    assert (found["node"], found["severity"]) == (node, "critical")
    ranks = server.client.get(f"/api/v1/jobs/{job.name}/ranks").json()["items"]
    assert node not in {rank["node"] for rank in ranks}
    # A restarted agent reports the old rank again.
    agents.kill(node)
    agents.start(node)
    step = shown.job()["step"]
    wait_for(lambda: shown.job()["step"] > step + 20, "training")
    assert shown.job()["generation"] == 100
    os.kill(old, signal.SIGKILL)
    slurm.start_node(node)
    wait_for(lambda: (incident() or {})["state"] == "resolved", "the end of the incident")
    wait_for(lambda: not slurm.states()[node].startswith("down"), "the node")


def test_a_hung_rank_of_torch_is_repaired(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    *_, job, shown = observed("gloo", options="--open-mode=append")
    os.kill(job.pid(1), signal.SIGSTOP)
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    assert job.requeues() == 1
    (action,) = shown.restarts()
    assert (action["state"], "SIGSTOP" in action["reason"]) == ("done", True)


def test_a_slow_node_is_replaced_after_the_jobs_own_checkpoint(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    server, _, job, shown = observed("gloo", nodes=3, options="--open-mode=append")
    wait_for(lambda: shown.job()["step"] >= 40, "healthy steps", seconds=120.0)
    slow = job.node(1)
    (job.directory / f"slow-{slow}").touch()
    (action,) = wait_for(shown.restarts, "the proposal", seconds=120.0)
    assert action["state"] == "proposed", "whether the script resumes is not known yet"
    assert slow in action["reason"]
    before = job.step()
    server.client.post(f"/api/v1/actions/{action['id']}/approve").raise_for_status()
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    assert job.requeues() == 1
    assert slow not in {start[2] for start in job.starts()[-3:]}
    assert slurm.states()[slow].startswith("drain")
    (done,) = shown.restarts()
    assert (done["state"], done["lost_steps"]) == ("done", 0)
    assert done["resumed_step"] >= before


def test_a_person_requests_a_restart_without_a_node(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    """The script saves after each step, so that no pause between two saves can be awaited."""
    server, _, job, shown = observed("gloo", options="--open-mode=append", launcher_mode="approve")
    wait_for(lambda: shown.job()["step"] >= 40, "checkpoints of the script", seconds=120.0)
    left_out = job.node(1)
    request = {"exclude_nodes": [left_out], "comment": "its NIC flaps"}
    address = f"/api/v1/jobs/{job.name}/restart"
    assert server.client.post(address, json=request).status_code == 202
    wait_for(lambda: [one["state"] for one in shown.restarts()] == ["failed"], "the refusal")
    assert "so often" in shown.restarts()[0]["error"]
    response = server.client.post(address, json={**request, "checkpoint": False})
    assert response.status_code == 202
    before = job.step()
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    assert job.requeues() == 1
    assert left_out not in (job.node(0), job.node(1))
    action = shown.restarts()[0]
    assert (action["state"], action["lost_steps"]) == ("done", 0)
    assert action["resumed_step"] >= before
    assert slurm.states()[left_out].startswith("drain")
    assert action["id"] in slurm.drain_reason(left_out)


def test_in_mode_approve_a_person_decides(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    server, _, job, shown = observed(options="--open-mode=append", launcher_mode="approve")
    assert shown.job()["mode"] == "approve"
    os.kill(job.pid(0), signal.SIGKILL)
    (action,) = wait_for(shown.restarts, "the proposal")
    assert (action["state"], job.requeues()) == ("proposed", 0)
    server.client.post(f"/api/v1/actions/{action['id']}/approve").raise_for_status()
    wait_for(lambda: shown.trains(100), "the next run", seconds=180.0)
    assert job.requeues() == 1


def test_a_canceled_job_stays_canceled(
    slurm: SlurmCluster,
    observed: Callable[..., Observed],
    wait_for: Callable[..., Any],
) -> None:
    *_, job, shown = observed()
    slurm.cancel(job.id)
    wait_for(lambda: shown.job()["state"] == "stopped", "the end")
    assert job.requeues() == 0
    assert slurm.job(job.id)["JobState"] == "CANCELLED"


def test_a_killed_server_continues_what_it_had_begun(
    slurm: SlurmCluster,
    run_process: Callable[..., Any],
    start_agents: Callable[..., Any],
    train: Callable[..., SlurmTraining],
    wait_for: Callable[..., Any],
    database_url: str,
) -> None:
    """The whole server is killed: once the request is committed, while the job is held, and once it
    runs again."""
    port = str(free_port())
    database = Database(database_url)

    def details() -> list[str]:
        """Return what each request waits for, or how it ended."""
        with database.read() as session:
            rows = session.scalars(select(LaunchRow.result).order_by(LaunchRow.created_ns))
            return [result.detail for result in rows]

    def start() -> Any:
        process = run_process("--port", port, "--launcher-mode", "auto")
        process.wait_until_up()
        return process

    server = start()
    url = f"http://127.0.0.1:{port}"
    agents = start_agents(url, slurm.nodes)
    token = read_token(token_path(Settings().state_directory, "operator"))
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60.0)
    job = train(agents.directory, options="--open-mode=append")
    shown = JobPage(client, job.name)
    wait_for(lambda: shown.trains(0), "training", seconds=180.0)
    for count, moment in enumerate(("", "requeued in held state", "Slurm runs job")):
        os.kill(job.pid(1), signal.SIGKILL)
        wait_for(
            lambda count=count, moment=moment: len(details()) > count and moment in details()[-1],
            "the moment",
            seconds=180.0,
        )
        server.end()
        server = start()
        wait_for(lambda count=count: shown.trains(100 * (count + 1)), "training", seconds=180.0)
        assert job.requeues() == count + 1
        assert shown.restarts()[0]["state"] == "done"
    assert len(job.starts()) == 2 * 4
    client.close()
    database.close()
