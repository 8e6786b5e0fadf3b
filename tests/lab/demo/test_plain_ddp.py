"""A plain DistributedDataParallel script, four ranks on two nodes: the correct rank is named."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.cluster import Cluster
from paceline_wire.local_token import find_token

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(300)]

TRAINER = """
import os, threading, time
import torch
import torch.distributed as dist
from torch import nn
import paceline

torch.set_num_threads(1)
dist.init_process_group("gloo")
paceline.init()
rank, case = dist.get_rank(), os.environ["CASE"]
layers = [nn.Linear(128, 128) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.06)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch, lock = torch.randn(32, 128), threading.Lock()

def waits_for_a_lock():
    lock.acquire()
    lock.acquire()

for step in paceline.steps(range(100_000)):
    time.sleep(0.03)
    if step > 100 and rank == 2:
        if case == "slow":
            time.sleep(0.03)
        elif case == "lock":
            waits_for_a_lock()
        elif case == "left":
            break
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
if case == "left":
    time.sleep(1000)
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster(node_count=2, port=0)
    try:
        started.start()
        yield started
    finally:
        started.close()
        started.remove_logs()


def incident_of(cluster: Cluster, script: Path, case: str, kind: str) -> dict[str, Any]:
    """Run the script; return the first incident of a kind."""
    headers = {"Authorization": f"Bearer {find_token(cluster.url, 'operator', os.environ)}"}
    url = f"{cluster.url}/api/v1"
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
        job = {
            "name": "plain",
            "argv": [sys.executable, str(script)],
            "topology": {"dp": 4, "pp": 1, "tp": 1},
            "mode": "observe",
            "environment": {"CASE": case},
        }
        job_id = client.post("/jobs", json=job).raise_for_status().json()["id"]
        deadline = time.monotonic() + 120
        found: list[dict[str, Any]] = []
        while not found and time.monotonic() < deadline:
            time.sleep(0.2)
            items = client.get(f"/incidents?job={job_id}").raise_for_status().json()["items"]
            found = [item for item in items if item["kind"] == kind]
        assert found, f"no {kind}: {items}"
        # The stacks that name the line arrive a moment later.
        detail: dict[str, Any] = {}
        while time.monotonic() < deadline and ".py:" not in detail.get("summary", ""):
            time.sleep(0.2)
            answer = client.get(f"/incidents/{found[0]['id']}").raise_for_status()
            detail = answer.json()
            if kind == "straggler":
                break
        return detail


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return path


def test_a_rank_that_takes_longer_is_the_straggler(cluster: Cluster, script: Path) -> None:
    incident = incident_of(cluster, script, "slow", "straggler")
    assert incident["rank"] == 2
    assert "since step 101" in incident["summary"]


@pytest.mark.parametrize(("case", "line"), [("lock", "waits_for_a_lock"), ("left", "<module>")])
def test_a_rank_that_never_arrives_is_the_culprit_with_its_line(
    cluster: Cluster, script: Path, case: str, line: str
) -> None:
    incident = incident_of(cluster, script, case, "hang")
    assert (incident["rank"], incident["side"]) == (2, "host")
    assert f"{line})" in incident["summary"]
