"""A real hang: two training processes, one stuck in its data loader behind a lock, all online."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.cluster import Cluster
from paceline_wire.local_token import find_token
from tests.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.campaign]

NODE_COUNT = 1

TRAINER = """
import os, threading
import torch
import torch.distributed as dist
import paceline

dist.init_process_group("gloo")
paceline.init()
rank, generation = dist.get_rank(), int(os.environ["PACELINE_GENERATION"])
lock = threading.Lock()

def reads_the_next_batch(step):
    with lock:
        return torch.ones(8)

def batches():
    for step in range(100_000):
        if step == 60 and rank == 1 and generation == 1:
            lock.acquire()  # and nobody will ever release it
        yield reads_the_next_batch(step)

for step, batch in paceline.steps(enumerate(batches())):
    threading.Event().wait(0.02)
    dist.all_reduce(batch)
"""


@pytest.mark.timeout(400)
def test_the_stack_of_the_culprit_is_taken_before_the_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    headers = {"Authorization": f"Bearer {find_token(cluster.url, 'operator', os.environ)}"}
    url = f"{cluster.url}/api/v1"
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
        job = {
            "name": "stuck",
            "argv": [sys.executable, str(script)],
            "topology": {"dp": 2, "pp": 1, "tp": 1},
            "mode": "auto",  # the script cannot checkpoint
        }
        job_id = client.post("/jobs", json=job).raise_for_status().json()["id"]

        def get(path: str) -> Any:
            return client.get(path).raise_for_status().json()

        def hangs() -> list[Any]:
            items = get(f"/incidents?job={job_id}")["items"]
            return [item for item in items if item["kind"] == "hang"]

        (listed,) = wait_for(hangs, "the hang")
        wait_for(lambda: get(f"/jobs/{job_id}")["generation"] == 2, "the restart")
        incident = get(f"/incidents/{listed['id']}")
        client.post(f"/jobs/{job_id}/stop").raise_for_status()

        assert (incident["kind"], incident["rank"], incident["side"]) == ("hang", 1, "host")
        assert incident["cause"] == "stuck in data loading"
        assert "reads_the_next_batch" in incident["summary"]
        stacks = {one["rank"]: one for one in incident["stacks"]}
        culprit, witness = (stacks[rank]["threads"][0]["frames"] for rank in (1, 0))
        assert (culprit[0]["function"], culprit[0]["line"]) == ("reads_the_next_batch", 13)
        assert "all_reduce" in {frame["function"] for frame in witness}
        shown = subprocess.run(
            [
                *(sys.executable, "-m", "paceline_cli", "incidents", "--server", cluster.url),
                *("show", incident["id"]),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "Rank 1, thread MainThread:\n    reads_the_next_batch  " in shown
        wait_for(lambda: get(f"/jobs/{job_id}")["state"] == "stopped", "the end")
