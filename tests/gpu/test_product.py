"""Server, agent and an ordinary script under torchrun, on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gpu.product import running_server, watch
from tests.waiting import wait_for

SCRIPT = Path(__file__).parent / "train.py"
STEPS = 400


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The answers of the API about a training that has ended."""
    directory = tmp_path_factory.mktemp("product")
    with running_server(directory) as url:
        training = watch(url, 1, [str(SCRIPT), str(STEPS)], directory, PACELINE_COUNT_FLOPS="1")
        status = training.wait(150)
        log = (directory / "watch.log").read_text()
        assert status == 0, log

        def ended() -> Any:
            (found,) = httpx.get(f"{url}/api/v1/jobs").json()["items"]
            return found["id"] if found["state"] == "finished" else None

        job = wait_for(ended, "the end of the job")
        shown = httpx.get(f"{url}/api/v1/jobs/{job}").json()
        steps = httpx.get(f"{url}/api/v1/jobs/{job}/steps").json()
        yield shown | {"steps_shown": steps, "log": log}


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
