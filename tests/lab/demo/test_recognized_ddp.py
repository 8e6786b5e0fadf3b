"""A DDP script without `paceline.steps` (`recognized_ddp.py`): its steps, and the right rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.cluster import Cluster
from tests.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("recognized_ddp.py")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster(node_count=2, port=free_port())
    try:
        started.start()
        yield started
    finally:
        started.close()
        started.remove_logs()


def get(client: httpx.Client, path: str) -> Any:
    return client.get(path).raise_for_status().json()


def start(client: httpx.Client, saved: Path, **environment: str) -> str:
    """Start the script on four ranks; return the id of the job."""
    job = {
        "name": "recognized",
        "argv": [sys.executable, str(SCRIPT)],
        "topology": {"dp": 4, "pp": 1, "tp": 1},
        "mode": "observe",
        "environment": {"SAVED": str(saved), **environment},
    }
    job_id: str = client.post("/jobs", json=job).raise_for_status().json()["id"]
    return job_id


@pytest.mark.parametrize("accumulated", ["1", "4"])
def test_a_healthy_run_has_its_steps_and_no_finding(
    client: httpx.Client, tmp_path: Path, accumulated: str
) -> None:
    tmp_path.chmod(0o777)
    job_id = start(client, tmp_path / "m.pt", CASE="none", ACCUMULATED=accumulated, STEPS="160")
    deadline = time.monotonic() + 300
    job: dict[str, Any] = {}
    while time.monotonic() < deadline and job.get("state") not in ("finished", "failed"):
        time.sleep(0.5)
        job = get(client, f"/jobs/{job_id}")
    assert job["state"] == "finished", job
    assert job["step"] == 159
    incidents = get(client, f"/incidents?job={job_id}")["items"]
    # A busy host, which is reported itself, stalls ranks now and then; evaluations and checkpoints
    # must not look like that.
    stalls = [each for each in incidents if each["kind"] == "transient_stall"]
    others = [each for each in incidents if each["kind"] not in ("transient_stall", "host_noise")]
    assert [each["summary"] for each in others] == []
    onsets = [get(client, f"/incidents/{each['id']}")["onset_step"] for each in stalls]
    assert not [step for step in onsets if step % 50 in (49, 0) or step % 40 in (39, 0)]
    steps = "from optimizer steps, 4 microbatches each" if accumulated == "4" else "from optimizer"
    assert job["metadata"]["steps"].startswith(steps)


@pytest.mark.parametrize("accumulated", ["1", "4"])
def test_a_slow_rank_is_named(client: httpx.Client, tmp_path: Path, accumulated: str) -> None:
    tmp_path.chmod(0o777)
    job_id = start(client, tmp_path / "m.pt", CASE="slow", ACCUMULATED=accumulated, STEPS="100000")
    deadline = time.monotonic() + 120
    found: list[dict[str, Any]] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.2)
        incidents = get(client, f"/incidents?job={job_id}")["items"]
        # A busy host is reported, and stalls other ranks for a moment.
        found = [
            each for each in incidents if each["kind"] not in ("transient_stall", "host_noise")
        ]
    assert [(each["kind"], each["rank"]) for each in found] == [("straggler", 2)], found
    if accumulated == "1":
        assert "since step 100" in found[0]["summary"]
