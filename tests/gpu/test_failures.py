"""Two ranks of NCCL on one GPU: who failed first, and where, from outside the training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.faults import descendants
from tests.gpu.product import running_server, watch
from tests.waiting import wait_for

SCRIPT = Path(__file__).parent / "pair.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server, and its directory."""
    directory = tmp_path_factory.mktemp("failures")
    with running_server(directory) as url:
        yield url, directory


def incident_of(server: tuple[str, Path], kind: str, how: str) -> dict[str, Any]:
    """Return the incident of a job whose rank 1 fails."""
    url, directory = server
    known = {job["id"] for job in httpx.get(f"{url}/api/v1/jobs").json()["items"]}
    training = watch(url, 2, [str(SCRIPT), how], directory)

    def found() -> Any:
        for job in httpx.get(f"{url}/api/v1/jobs").json()["items"]:
            if job["id"] not in known:
                items = httpx.get(f"{url}/api/v1/incidents?job={job['id']}").json()["items"]
                return next((each for each in items if each["kind"] == kind), None)
        return None

    try:
        incident: dict[str, Any] = wait_for(found, "the incident")
    except AssertionError as error:
        raise AssertionError((directory / "watch.log").read_text()[-6000:]) from error
    finally:
        for pid in (*descendants(training.pid), training.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        training.wait(60)
    return incident


@pytest.mark.parametrize(
    "how",
    ["is killed", "raises an error", "runs out of memory", "has an illegal index"],
)
def test_the_rank_that_fails_first_is_named(how: str, server: tuple[str, Path]) -> None:
    incident = incident_of(server, "failure", how)
    assert incident["rank"] == 1, incident["summary"]


def test_lost_connections_are_an_error_of_nccl(server: tuple[str, Path]) -> None:
    incident = incident_of(server, "failure", "loses its connections")
    assert "NCCL" in json.dumps(incident), incident["summary"]


@pytest.mark.parametrize(
    "how", ["sleeps", "is stopped", "waits for another collective", "computes forever"]
)
def test_the_rank_that_hangs_is_named(how: str, server: tuple[str, Path]) -> None:
    incident = incident_of(server, "hang", how)
    assert incident["rank"] == 1, incident["summary"]
