"""A job from its request to its end, through a real server, with simulated nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated_node import SimulatedNode, post_job

from paceline_wire.commands import ControlRanks, StartRanks, StopGeneration


def get(server: Any, path: str) -> Any:
    return server.client.get(f"/api/v1{path}").raise_for_status().json()


def test_a_job_starts_trains_survives_a_crash_and_stops(
    server: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    job_id = post_job(server.url)
    wait_for(lambda: get(server, f"/jobs/{job_id}")["state"] == "running", "training")
    wait_for(lambda: (get(server, f"/jobs/{job_id}")["step"] or 0) >= 5, "steps")
    ranks = get(server, f"/jobs/{job_id}/ranks")["items"]
    assert [rank["state"] for rank in ranks] == ["attached", "attached"]
    assert [cell["node"] for cell in get(server, f"/jobs/{job_id}/grid")["cells"]] == [
        rank["node"] for rank in ranks
    ]

    home = next(node for node in nodes if node.agent_id == ranks[1]["node"])
    home.crash(1)
    wait_for(lambda: get(server, f"/jobs/{job_id}")["generation"] == 2, "the restart")
    wait_for(lambda: get(server, f"/jobs/{job_id}")["state"] == "running", "training again")
    incident = get(server, f"/incidents?job={job_id}")["items"][0]
    assert (incident["kind"], incident["rank"], incident["state"]) == ("failure", 1, "resolved")
    job = get(server, f"/jobs/{job_id}")
    assert job["restarts"] == 1
    assert 0.0 < job["ledger"]["ettr_ratio"] < 1.0
    check_recovery(server, incident)

    server.client.post(f"/api/v1/jobs/{job_id}/stop").raise_for_status()
    wait_for(lambda: get(server, f"/jobs/{job_id}")["state"] == "stopped", "the end")
    assert all(not node.ranks for node in nodes)
    assert all(node["job_id"] is None for node in get(server, "/nodes")["items"])
    verbs = [record["verb"] for record in get(server, f"/audit?job={job_id}")["items"]]
    assert verbs[-1] == "created"
    assert "asked to stop" in verbs


def check_recovery(server: Any, incident: dict[str, Any]) -> None:
    """The times of the repair are in the incident, the distributions and the metrics."""
    parts = {name: value for name, value in incident["recovery"].items() if value is not None}
    total = parts.pop("total_seconds")
    assert {"decide_seconds", "stop_seconds", "start_seconds", "resume_seconds"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(total, abs=1e-6)
    assert incident["opened_at"] <= incident["detected_at"]
    assert incident["onset_at"] is None or incident["onset_at"] <= incident["detected_at"]
    everything, week = get(server, f"/recoveries?job={incident['job_id']}")["groups"]
    assert (everything["kind"], everything["launcher"], everything["count"]) == (
        "failure",
        "paceline",
        1,
    )
    assert everything["parts"]["total"]["p99_seconds"] == total
    assert (everything["week"], week["count"]) == (None, 1)
    text = server.client.get("/metrics").text
    assert 'paceline_recoveries{kind="failure",launcher="paceline"} 1.0' in text
    assert 'part="total",quantile="0.99"' in text


@pytest.mark.any_database
def test_a_person_has_a_job_restarted_without_a_node(
    server: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    job_id = post_job(server.url, policy={"mode": "observe"})
    wait_for(lambda: (get(server, f"/jobs/{job_id}")["step"] or 0) >= 5, "steps")
    left = get(server, f"/jobs/{job_id}/ranks")["items"][1]["node"]
    body = {"exclude_nodes": [left], "checkpoint": False}
    answer = server.client.post(f"/api/v1/jobs/{job_id}/restart", json=body)
    action = f"/actions/{answer.raise_for_status().json()['id']}"
    wait_for(lambda: get(server, action)["state"] == "done", "the restart")
    job = get(server, f"/jobs/{job_id}")
    assert (job["state"], job["generation"]) == ("running", 2)
    assert left not in {rank["node"] for rank in get(server, f"/jobs/{job_id}/ranks")["items"]}
    state = {one["id"]: (one["state"], one["reason"]) for one in get(server, "/nodes")["items"]}
    assert state[left][0] == "quarantined"
    assert state[left][1].startswith("requested by ")


@pytest.mark.any_database
def test_commands_are_carried_out_once(
    server: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    job_id = post_job(server.url)
    wait_for(lambda: (get(server, f"/jobs/{job_id}")["step"] or 0) >= 3, "steps")
    server.client.post(f"/api/v1/jobs/{job_id}/stop").raise_for_status()
    wait_for(lambda: get(server, f"/jobs/{job_id}")["state"] == "stopped", "the end")
    kinds = [type(command) for node in nodes for command in node.carried_out]
    assert kinds.count(StartRanks) == 2
    assert kinds.count(StopGeneration) == 2
    assert ControlRanks not in kinds


@pytest.mark.any_database
def test_a_job_that_cannot_start_says_why(
    server: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    for node in nodes:
        node.start_error = "rank 0: [Errno 2] No such file or directory: 'trian.py'"
    job_id = post_job(server.url, policy={"mode": "observe"})
    wait_for(lambda: get(server, f"/jobs/{job_id}")["state"] == "failed", "the end")
    text = get(server, f"/jobs/{job_id}")["verdict"]["text"]
    assert text.endswith("rank 0: [Errno 2] No such file or directory: 'trian.py'.")
