"""The Slurm backend against real daemons: what it refuses, and what it recognizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from slurm_cluster import SlurmCluster

from paceline_server.decide.types import LaunchRequest
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import LauncherRefusedError
from paceline_server.launchers.slurm import SlurmLauncher

real_slurm = [pytest.mark.campaign, pytest.mark.timeout(300)]


def test_ranks_of_one_job_on_nodes_with_the_agents_names_are_recognized() -> None:
    def rank(node: str, job: str = "7", restarts: str = "1") -> dict[str, str]:
        return {"slurm_job": job, "slurm_node": node, "slurm_restarts": restarts}

    recognize = SlurmLauncher().recognize
    found = recognize({"n0": rank("n0"), "n1.cluster.example": rank("n1")})
    nodes = {"n0": "n0", "n1.cluster.example": "n1"}
    assert found == Launch(launcher="slurm", job="7", restarts=1, nodes=nodes)
    assert recognize({"n0": {}}) is None
    assert recognize({"n0": rank("n0"), "n1": rank("n1", job="8")}) is None
    assert recognize({"n0": rank("n0"), "n1": rank("n1", restarts="2")}) is None
    assert recognize({"n0": rank("n0", job="7 8")}) is None
    assert recognize({"n0": rank("n5")}) is None, "a rank may not speak for another node"
    assert recognize({"n[0-3]": rank("n[0-3]")}) is None, "nor for several"


def test_without_slurms_commands_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = Launch(launcher="slurm", job="7", restarts=0, nodes={"n0": "n0"})
    request = LaunchRequest(action_id="act-1", kind="check", launch=launch, reason="It crashed.")
    with pytest.raises(
        LauncherRefusedError, match="has no squeue: install Slurm's client commands"
    ):
        SlurmLauncher().observe(request)


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., str]]:
    submitted: list[str] = []

    def start(*options: str, nodes: int = 2) -> str:
        script = tmp_path / "job.sh"
        script.write_text("#!/bin/bash\n#SBATCH --exclusive -o /dev/null\nsleep 3600\n")
        submitted.append(slurm.submit(script, f"-N{nodes}", *options))
        return submitted[-1]

    yield start
    for job in submitted:
        slurm.cancel(job)


def check_of(slurm: SlurmCluster, job: str, *exclude: str, training: bool = True) -> LaunchRequest:
    nodes = slurm.control("show", "hostnames", slurm.job(job)["NodeList"]).split()
    launch = Launch(launcher="slurm", job=job, restarts=0, nodes={node: node for node in nodes})
    return LaunchRequest(
        action_id="act-1",
        kind="check",
        launch=launch,
        exclude=list(exclude),
        is_training=training,
        reason="It is slow.",
    )


def proceed(launcher: SlurmLauncher, restart: LaunchRequest) -> bool:
    """Do what the restart needs next. Return whether it is done."""
    seen = launcher.observe(restart)
    if seen.state != "done":
        launcher.begin(restart, seen)
    return seen.state == "done"


class TestRefusals:
    """Checks before anything is stopped."""

    pytestmark = real_slurm

    def test_a_job_that_trains_is_restarted_only_if_it_gets_nodes(
        self, slurm: SlurmCluster, submit: Callable[..., str], wait_for: Callable[..., Any]
    ) -> None:
        first = submit()
        wait_for(lambda: slurm.job(first)["JobState"] == "RUNNING")
        check = check_of(slurm, first, "n0")
        assert SlurmLauncher().observe(check).state == "ready"
        second = submit()
        wait_for(lambda: slurm.job(second)["JobState"] == "RUNNING")
        seen = SlurmLauncher().observe(check)
        assert (seen.state, seen.detail) == (
            "refused",
            "Partition main has no idle node to replace n0.",
        )
        in_place = replace(check, exclude=[])
        assert SlurmLauncher().observe(in_place).state == "ready"
        third = submit()
        wait_for(lambda: slurm.job(third)["Reason"] in ("Resources", "Priority"))
        seen = SlurmLauncher().observe(in_place)
        assert seen.state == "refused"
        assert "could get those of job" in seen.detail
        dead = replace(check, is_training=False)
        assert SlurmLauncher().observe(dead).state == "ready", "a dead job has nothing to lose"

    def test_jobs_that_slurm_cannot_or_should_not_requeue(
        self, slurm: SlurmCluster, submit: Callable[..., str], wait_for: Callable[..., Any]
    ) -> None:
        job = submit("--no-requeue")
        wait_for(lambda: slurm.job(job)["JobState"] == "RUNNING")
        check = check_of(slurm, job)
        assert "--no-requeue" in SlurmLauncher().observe(check).detail
        forged = replace(check, launch=replace(check.launch, nodes={"n3": "n3"}))
        slurm.control("update", f"JobId={job}", "Requeue=1")
        seen = SlurmLauncher().observe(forged)
        assert seen.state == "refused"
        assert "but Slurm shows n0, n1" in seen.detail
        slurm.cancel(job)
        wait_for(lambda: slurm.job(job)["JobState"] == "CANCELLED")
        wait_for(lambda: SlurmLauncher().observe(check).state == "over")
        unknown = replace(check, launch=replace(check.launch, job="424242"))
        seen = SlurmLauncher().observe(unknown)
        assert (seen.state, "no longer has job 424242" in seen.detail) == ("refused", True)

    def test_a_job_that_asks_for_the_bad_node_by_name_is_refused(
        self, slurm: SlurmCluster, submit: Callable[..., str], wait_for: Callable[..., Any]
    ) -> None:
        job = submit("--nodelist=n1,n2")
        wait_for(lambda: slurm.job(job)["JobState"] == "RUNNING")
        seen = SlurmLauncher().observe(check_of(slurm, job, "n1", training=False))
        assert (seen.state, "asks for n1 by name" in seen.detail) == ("refused", True)

    def test_a_job_that_someone_else_requeued_is_not_requeued_again(
        self, slurm: SlurmCluster, submit: Callable[..., str], wait_for: Callable[..., Any]
    ) -> None:
        job = submit()
        wait_for(lambda: slurm.job(job)["JobState"] == "RUNNING")
        check = check_of(slurm, job, training=False)
        restart = replace(check, kind="restart")
        slurm.control("requeue", job)
        wait_for(lambda: slurm.job(job)["Restarts"] == "1")
        launcher = SlurmLauncher()
        wait_for(partial(proceed, launcher, restart), "the job, without the wait for BeginTime")
        assert slurm.job(job)["Restarts"] == "1"
        assert launcher.observe(check).state == "refused"

    def test_only_the_task_of_an_array_that_needs_it_is_requeued(
        self, slurm: SlurmCluster, submit: Callable[..., str], wait_for: Callable[..., Any]
    ) -> None:
        """The last task that starts has the id of the array, which names all tasks."""
        array = submit("--array=0-1", nodes=1)
        tasks = [f"{array}_0", f"{array}_1"]
        wait_for(lambda: all(slurm.job(task)["JobState"] == "RUNNING" for task in tasks))
        (last,) = [task for task in tasks if slurm.job(task)["JobId"] == array]
        (other,) = [task for task in tasks if task != last]
        nodes = {slurm.job(last)["NodeList"]: slurm.job(last)["NodeList"]}
        launch = Launch(launcher="slurm", job=array, restarts=0, nodes=nodes)
        request = LaunchRequest(action_id="act-1", kind="restart", launch=launch, reason="Hung.")
        launcher = SlurmLauncher()
        assert not launcher.observe(request).has_effect
        wait_for(partial(proceed, launcher, request), "the task")
        assert launcher.observe(request).has_effect
        assert [slurm.job(task)["Restarts"] for task in (last, other)] == ["1", "0"]
        assert slurm.job(other)["JobState"] == "RUNNING"
