"""The identity of a rank, from the variables of its launcher."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.environment import (
    RankEnvironment,
    identify,
    lost_torchrun,
    read_rank_environment,
)
from paceline_wire.ring import RingReader
from paceline_wire.topology import Coordinates, Topology

HOST = socket.gethostname().partition(".")[0][:40]
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_xm/none_t06jayfd/attempt_0/1/error.json",
}
NODES = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456"}
AGAIN = TORCHRUN | {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}
BY_ITSELF = "d35fcb89-ba81-436a-be1c-6aa2bc2cbbd7"
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
}
POD = {
    "JOBSET_NAME": "bert",
    "POD_NAMESPACE": "team-a",
    "NODE_NAME": "n3",
    "JOBSET_UID": "5f",
    "JOBSET_RESTART_ATTEMPT": "1",
    "JOBSET_IN_PLACE_RESTART_ATTEMPT": "",
    "PACELINE_KUBERNETES_RESTARTS": "2",
}
SBATCH = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


def rank_environment(**environment: str) -> RankEnvironment:
    found = read_rank_environment({"PACELINE_RING_DIRECTORY": "/rings", **environment})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (5, 8, 1)),
        (SRUN, (3, 4, 1)),
        (SRUN | TORCHRUN, (5, 8, 1)),
        (SBATCH, (0, 1, 0)),
        (MPIRUN, (2, 6, 0)),
    ],
)
def test_rank_and_sizes_come_from_the_launcher(
    environment: dict[str, str], place: tuple[int, int, int]
) -> None:
    found = rank_environment(**environment)
    assert (found.rank, found.world_size, found.local_rank) == place
    assert found.topology.world_size == found.world_size


@pytest.mark.parametrize(
    ("environment", "job", "generation"),
    [
        (TORCHRUN, f"torchrun-{HOST}-t06jayfd", 0),
        (TORCHRUN | NODES, "torchrun-10.0.0.7", 0),
        (TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "/own/error.json"}, f"torchrun-{HOST}", 0),
        (AGAIN, "torchrun-abc", 2),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": BY_ITSELF}, "torchrun-d35fcb89-ba81", 0),
        (SRUN | TORCHRUN, "slurm-77", 0),
        (SRUN | {"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, "slurm-77", 201),
        (SRUN | {"SLURM_RESTART_COUNT": "2", "PACELINE_GENERATION": "200"}, "slurm-77", 200),
        (SRUN | {"PACELINE_JOB": "gpt", "PACELINE_GENERATION": "7"}, "gpt", 7),
        (POD | TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, "jobset-team-a.bert", 301),
        (POD | {"JOBSET_NAME": 63 * "x"}, f"jobset-team-a.{41 * 'x'}-9727b6d6", 300),
        ({"PACELINE_JOB": "_a/b c"}, "a_b_c", 0),
        (MPIRUN, "local", 0),
        (MPIRUN | {"PMIX_NAMESPACE": "prterun-node-1-77@1"}, "mpirun-prterun-node-1-77@1", 0),
        (BY_HAND, "bert-master-0-23456", 0),
        (BY_HAND | {"MASTER_ADDR": "127.0.0.1"}, f"{HOST}-23456", 0),
        (BY_HAND | {"MASTER_ADDR": "bert." + 60 * "x"}, "bert." + 35 * "x" + "-23456", 0),
    ],
)
def test_job_and_generation_are_the_same_for_all_ranks_and_no_other_run(
    environment: dict[str, str], job: str, generation: int
) -> None:
    found = rank_environment(**environment)
    assert (found.job, found.generation) == (job, generation)
    assert found.ring_path == Path(f"/rings/{job}.g{generation}.r{found.rank}.ring")


def test_a_rank_without_a_launcher_is_named_after_its_process() -> None:
    assert rank_environment().job == f"{HOST}-{os.getpid()}"


def test_without_an_agent_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    agents(monkeypatch)
    assert read_rank_environment(TORCHRUN) is None


@pytest.mark.parametrize(
    ("program", "script"),
    [
        ("/home/ann/train.py", "train.py"),
        ("train", "train"),
        ("/usr/lib/pretrain/__main__.py", "pretrain"),
        ("/data/tr\udce4in.py", "tr?in.py"),
        (70 * "x", 64 * "x"),
        ("-c", None),
        ("/usr/lib/python3/ray/_private/workers/default_worker.py", None),
        ("", None),
    ],
)
def test_a_training_is_named_after_its_script(
    monkeypatch: pytest.MonkeyPatch, program: str, script: str | None
) -> None:
    monkeypatch.setattr("sys.argv", [program])
    identity = identify(rank_environment(), Topology(), Coordinates(), {})
    assert identity.metadata.get("script") == script


def agents(monkeypatch: pytest.MonkeyPatch, *rings: str) -> None:
    found = [Path(each) for each in rings]
    monkeypatch.setattr("paceline.environment.rings_of_running_agents", lambda: found)


def test_the_agent_of_the_node_is_found_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    agents(monkeypatch, "/dev/shm/paceline-a/rings")
    found = read_rank_environment({})
    assert found is not None
    assert found.ring_directory == Path("/dev/shm/paceline-a/rings")
    assert rank_environment().ring_directory == Path("/rings")


def test_an_empty_ring_directory_disables_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    agents(monkeypatch, "/dev/shm/paceline-a/rings")
    assert read_rank_environment({"PACELINE_RING_DIRECTORY": ""}) is None


def test_several_agents_on_a_node_need_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    agents(monkeypatch, "/dev/shm/paceline-a/rings", "/dev/shm/paceline-b/rings")
    with pytest.raises(ValueError, match=r"several agents.*paceline-a/rings, .*paceline-b/rings"):
        read_rank_environment({})


def test_many_short_metadata_entries_fit_the_page(
    ring_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paceline.init(metadata={f"{number:03}": "" for number in range(1000)})
    metadata = RingReader(ring_directory / "local.g0.r0.ring").identity.metadata
    assert len(metadata) > 300
    assert "metadata entries" in caplog.text


def test_metadata_that_fits_is_kept_and_the_rest_is_dropped(
    ring_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paceline.init(metadata={"a": "x" * 2900, "b": "y" * 2900, "c \udc80": "z" * 50})
    metadata = RingReader(ring_directory / "local.g0.r0.ring").identity.metadata
    assert metadata.keys() - {"python", "torch", "script"} == {"a", "c ?"}
    assert "kept 2 of 3 metadata entries; the limit is 3000 bytes" in caplog.text


def test_coordinates_in_another_order_are_reported_as_given(
    ring_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    paceline.init(dp_rank=1, pp_rank=0, topology=Topology(dp=2, pp=2))
    identity = RingReader(ring_directory / "local.g0.r2.ring").identity
    assert (identity.coordinates.dp_rank, identity.coordinates.pp_rank) == (1, 0)


def test_a_rank_in_a_pod_of_a_jobset_names_it_its_node_and_the_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    found = identify(rank_environment(), Topology(), Coordinates(), {}).metadata
    assert {name: value for name, value in found.items() if name.startswith("kubernetes_")} == {
        "kubernetes_job": "team-a/bert",
        "kubernetes_node": "n3",
        "kubernetes_restarts": "3",
        "kubernetes_uid": "5f",
    }


@pytest.mark.parametrize(
    ("options", "least"),
    [(["--nnodes=2:4"], "2"), (["--nnodes", "3"], "3"), ([], None), (["--nnodes=x"], None)],
)
def test_a_rank_of_torchrun_reports_what_torchrun_may_do(
    tmp_path: Path, options: list[str], least: str | None
) -> None:
    """The parent's command line is what torchrun itself was started with."""
    code = (
        "from paceline.environment import identify, read_rank_environment\n"
        "from paceline_wire.topology import Coordinates, Topology\n"
        "found = read_rank_environment()\n"
        "print(sorted(identify(found, Topology(), Coordinates(), {}).metadata.items()))\n"
    )
    parent = tmp_path / "torchrun"
    parent.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])\n")
    variables = {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_MAX_RESTARTS": "3"}
    variables |= {"TORCHELASTIC_RESTART_COUNT": "1", "PACELINE_RING_DIRECTORY": str(tmp_path)}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run(
        [sys.executable, str(parent), *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    metadata = dict(ast.literal_eval(done.stdout))
    assert {name: value for name, value in metadata.items() if name.startswith("torchrun_")} == {
        "torchrun_run": "torchrun-abc",
        "torchrun_restarts": "1",
        "torchrun_max_restarts": "3",
        "torchrun_shares_store": "1",
        **({"torchrun_least_nodes": least} if least else {}),
    }


def test_a_rank_of_a_slurm_job_names_the_job_its_node_and_the_requeues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def metadata() -> dict[str, str]:
        found = identify(rank_environment(), Topology(), Coordinates(), {}).metadata
        return {name: value for name, value in found.items() if name.startswith("slurm_")}

    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert metadata() == {}
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert metadata() == {"slurm_job": "77", "slurm_node": "n3", "slurm_restarts": "0"}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert metadata()["slurm_restarts"] == "2"


@pytest.mark.parametrize(
    ("environment", "is_gone"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "3"}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"}, False),
        ({"TORCHELASTIC_RUN_ID": "none", "PACELINE_NODE_DIRECTORY": "/node"}, False),
        ({}, False),
    ],
)
def test_a_rank_whose_torchrun_was_killed_knows_that_nothing_starts_it_again(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_gone: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lost_torchrun() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    expected = "the torchrun of rank 3 is gone, and would not start it again"
    assert lost_torchrun() == (expected if is_gone else None)
