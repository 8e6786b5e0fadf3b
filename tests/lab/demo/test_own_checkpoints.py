"""A script that only saves and resumes by itself is repaired after its own next checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.cluster import Cluster
from paceline_demo.fake_nvml import THROTTLE_REASONS
from tests.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.campaign]

NODE_COUNT = 3

EVERY = 200  # as in plain_trainer.py


def restart_server(cluster: Cluster) -> None:
    assert cluster.server is not None
    cluster.server.kill()
    cluster.server.wait()
    cluster.start_server()
    cluster.wait_for_server(lambda: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("by", "saved"), [("torch.save", "latest.pt"), ("dcp", "step-*")])
def test_a_planned_repair_of_a_plain_script_waits_for_its_checkpoint(
    cluster: Cluster, client: httpx.Client, tmp_path: Path, by: str, saved: str
) -> None:
    script = Path(__file__).with_name("plain_trainer.py")
    body = {
        "name": "plain",
        "argv": [sys.executable, str(script)],
        "topology": {"dp": 4, "pp": 1, "tp": 1},
        "environment": {"PACELINE": "1", "CHECKPOINTS": str(tmp_path), "BY": by},
        "mode": "auto",
    }
    job_id = client.post("/jobs", json=body).raise_for_status().json()["id"]

    def get(path: str) -> Any:
        return client.get(path).raise_for_status().json()

    def job() -> Any:
        return get(f"/jobs/{job_id}")

    def restarts() -> list[Any]:
        items = get(f"/actions?job={job_id}")["items"]
        return [item for item in items if item["kind"] == "restart"]

    wait_for(lambda: job()["checkpoint_interval_steps"] == EVERY, "two checkpoints")
    assert job()["can_checkpoint"] is False
    assert job()["checkpoint_path"] == str(tmp_path / saved)
    assert job()["resumes"] is None
    assert job()["checkpoint_advice"]["interval_steps"] > EVERY

    rank = get(f"/jobs/{job_id}/ranks")["items"][3]
    os.kill(rank["pid"], signal.SIGKILL)
    wait_for(lambda: job()["generation"] == 2 and job()["state"] == "running", "the restart")
    wait_for(lambda: job()["resumes"], "the proof that the script resumes")
    (crash,) = restarts()
    assert crash["resumed_step"] % EVERY == 0
    assert crash["resumed_step"] > 0

    slow = [one for one in get(f"/jobs/{job_id}/ranks")["items"] if one["node"] == "node-1"]
    gpus = cluster.nodes[1].gpus
    assert gpus is not None
    for one in slow:
        (tmp_path / f"slow-{one['rank']}").touch()
        gpus.set(
            one["local_rank"],
            sm_clock_mhz=500,
            temperature_celsius=95,
            throttle_reasons=THROTTLE_REASONS["sw_thermal_slowdown"],
        )
    planned = wait_for(
        lambda: next((one for one in restarts() if one["exclude_nodes"]), None), "the plan"
    )
    assert planned["phases"][0]["name"] == "wait"
    assert "after the script's own next checkpoint" in planned["reason"]
    assert planned["worth"]["gain_seconds"] > planned["worth"]["cost_seconds"] > 0
    assert job()["state"] == "running"
    restart_server(cluster)
    wait_for(lambda: job()["generation"] == 3, "the stop")
    for path in tmp_path.glob("slow-*"):
        path.unlink()
    wait_for(lambda: job()["state"] == "running", "the second restart")
    done = next(one for one in restarts() if one["id"] == planned["id"])
    print({name: done[name] for name in ("reason", "phases", "resumed_step", "lost_steps")})
    assert (done["state"], done["exclude_nodes"]) == ("done", ["node-1"])
    assert done["resumed_step"] % EVERY == 0
    assert done["resumed_step"] > crash["resumed_step"]
    assert 1 <= done["lost_steps"] < EVERY // 2
    client.post(f"/jobs/{job_id}/stop").raise_for_status()
    wait_for(lambda: job()["state"] == "stopped", "the end")
