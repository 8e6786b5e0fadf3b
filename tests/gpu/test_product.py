"""Server, agent and an ordinary script under torchrun, on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.waiting import wait_for

SCRIPT = Path(__file__).parent / "train.py"
STEPS = 400


def start(*arguments: str, directory: Path, **settings: str) -> subprocess.Popen[bytes]:
    own = {
        "PACELINE_STATE_DIRECTORY": str(directory / "state"),
        "PACELINE_AGENT_NODE_DIRECTORY": str(directory / "node"),
    }
    with (directory / f"{arguments[0]}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline_cli", *arguments],
            env=os.environ | own | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The answers of the API about a training that has ended."""
    directory = tmp_path_factory.mktemp("product")
    url = f"http://127.0.0.1:{free_port()}"
    database = f"sqlite:///{directory}/paceline.db"
    server = start(
        *("server", "--database-url", database, "--port", url.rpartition(":")[2]),
        directory=directory,
    )
    try:
        wait_for(lambda: responds(url), "the server")
        training = start(
            *("watch", "--server", url, "--", sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node=1", f"--master-port={free_port()}", str(SCRIPT), str(STEPS)),
            directory=directory,
            PACELINE_COUNT_FLOPS="1",
        )
        status = training.wait(150)
        assert status == 0, (directory / "watch.log").read_text()

        def ended() -> Any:
            (found,) = httpx.get(f"{url}/api/v1/jobs").json()["items"]
            return found["id"] if found["state"] == "finished" else None

        job = wait_for(ended, "the end of the job")
        shown = httpx.get(f"{url}/api/v1/jobs/{job}").json()
        steps = httpx.get(f"{url}/api/v1/jobs/{job}/steps").json()
        yield shown | {"steps_shown": steps, "log": (directory / "watch.log").read_text()}
    finally:
        server.terminate()
        server.wait(60)


def test_the_steps_of_the_script_are_recognized(job: dict[str, Any]) -> None:
    assert job["step"] >= STEPS - 2, job["log"]


def test_mfu_is_that_of_the_device(job: dict[str, Any]) -> None:
    efficiency = job["efficiency"]
    assert efficiency["peak_flops_per_second"], efficiency
    assert 0.01 < efficiency["mfu_ratio"] < 0.9
    assert efficiency["tokens_per_second"] > 0


def test_memory_is_that_of_the_allocator(job: dict[str, Any]) -> None:
    memory = job["efficiency"]["memory"]
    # 26.2 million parameters of two bytes; AdamW holds two values of the same type for each.
    assert memory["parameters_bytes"] == memory["gradients_bytes"]
    assert memory["optimizer_bytes"] == pytest.approx(2 * memory["parameters_bytes"], rel=0.01)
    assert memory["peak_bytes"] > 4 * memory["parameters_bytes"]
    assert memory["reserved_bytes"] >= memory["allocated_bytes"]
