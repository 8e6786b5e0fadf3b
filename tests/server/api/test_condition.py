"""The API for jobs that are hung, dead, or without recent data."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest
from simulated_node import hello, post_job

from paceline_server.decide.types import IncidentView
from paceline_server.detect.finding import Finding
from paceline_server.store.models import IncidentRow, JobRow, NodeRow, RankRow
from tests.server.rows import toy_rank

SECOND = 1_000_000_000
NOW = time.time_ns()
Severity = Literal["info", "warning", "critical"]


def put(server: Any, *rows: Any) -> None:
    with server.program.database.write() as session:
        for row in rows:
            session.add(row)
            session.flush()


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    """A server whose clock is stopped, without a worker, so that the rows of a test stay true."""
    started = run_server(role="api")
    parts = started.app.state.parts
    started.app.state.parts = dataclasses.replace(parts, now_ns=lambda: NOW)
    return started


@pytest.fixture
def client(server: Any) -> Any:
    return server.client


@pytest.fixture
def job_id(server: Any) -> str:
    """A running job of two ranks on two nodes, analyzed just now."""
    job_id = post_job(server.url)
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step, job.generation, job.ticked_ns = "running", 5, 1, NOW
    for rank in (0, 1):
        put(
            server,
            NodeRow(
                agent_id=f"node-{rank}",
                boot_id="boot",
                sequence=0,
                packed_ns=NOW,
                last_seen_ns=NOW,
                hello=hello(1),
                readings={},
                dropped_batches=0,
            ),
            toy_rank(job_id, rank, f"node-{rank}"),
        )
    return job_id


def incident(
    job_id: str, name: str, severity: Severity, cost: float, kind: str = "straggler", rank: int = 1
) -> IncidentRow:
    finding = Finding(
        kind=kind,
        cause="unknown",
        fingerprint=name,
        summary=f"{name}.",
        detected_ns=1,
        generation=1,
        rank=rank,
        severity=severity,
        cost_ratio=cost,
    )
    opened_ns = NOW
    view = IncidentView(incident_id=name, finding=finding, opened_ns=opened_ns)
    return IncidentRow(
        id=name,
        job_id=job_id,
        kind=kind,
        severity=severity,
        state="open",
        opened_ns=opened_ns,
        view=view,
    )


def get(client: httpx.Client, job_id: str) -> Any:
    return client.get(f"/api/v1/jobs/{job_id}").json()


def conditions(client: httpx.Client, job_id: str) -> list[str]:
    items = client.get(f"/api/v1/jobs/{job_id}/ranks").json()["items"]
    return [rank["condition"] for rank in items]


def change(server: Any, table: Any, key: Any, **values: object) -> None:
    with server.program.database.write() as session:
        row = session.get_one(table, key)
        for name, value in values.items():
            setattr(row, name, value)


@pytest.mark.parametrize(
    ("status", "seconds", "condition", "part"),
    [
        ("starting", 30, "starting", "all 2 ranks run, and none has finished a step"),
        ("starting", 130, "unobserved", "have reported no step since they started"),
        ("running", 130, "starting", "2 of 2 ranks have begun the first step"),
        ("running", 1900, "unobserved", "have reported no step since they started"),
    ],
)
def test_ranks_without_a_step_may_load_for_a_while(
    server: Any,
    client: httpx.Client,
    job_id: str,
    status: str,
    seconds: int,
    condition: str,
    part: str,
) -> None:
    created_ns = NOW - seconds * SECOND
    change(server, JobRow, job_id, step=None, created_ns=created_ns)
    for rank in (0, 1):
        change(server, RankRow, (job_id, rank), status=status)
    shown = get(client, job_id)
    verdict = shown["verdict"]
    assert (shown["condition"], verdict["kind"]) == (condition, condition)
    assert part in verdict["text"]


def test_a_standstill_is_shown_with_what_each_rank_does_until_a_hang_is_found(
    server: Any, client: httpx.Client, job_id: str
) -> None:
    put(server, incident(job_id, "the CPUs are busy", "info", 0.0, "host_noise"))
    change(server, JobRow, job_id, step_seconds=0.5)
    change(server, RankRow, (job_id, 0), operation="checkpoint", operation_seconds=34.2)
    assert get(client, job_id)["verdict"]["kind"] == "host_noise"
    change(server, RankRow, (job_id, 1), operation="all_reduce world#7", operation_seconds=9.0)
    assert get(client, job_id)["verdict"]["kind"] == "host_noise"
    change(server, RankRow, (job_id, 1), operation_seconds=33.0)
    verdict = get(client, job_id)["verdict"]
    assert (verdict["kind"], verdict["incident_id"]) == ("standstill", None)
    assert verdict["text"] == (
        "No progress for 33 s: rank 0 in checkpoint, rank 1 in all_reduce world#7."
    )
    put(server, incident(job_id, "rank 0 keeps the job waiting", "info", 0.0, "hang"))
    waits = get(client, job_id)["verdict"]
    assert (waits["kind"], waits["incident_id"]) == ("standstill", "rank 0 keeps the job waiting")
    assert waits["text"] == f"{verdict['text']} rank 0 keeps the job waiting."
    change(server, IncidentRow, "rank 0 keeps the job waiting", state="resolved")
    change(server, JobRow, job_id, step_seconds=5.0)
    assert get(client, job_id)["verdict"]["kind"] == "host_noise"
    change(server, JobRow, job_id, step_seconds=0.5)
    put(server, incident(job_id, "hung", "critical", 0.0, "hang"))
    assert get(client, job_id)["verdict"]["incident_id"] == "hung"


def test_the_headline_and_the_list_begin_with_the_worst_incident(
    server: Any, client: httpx.Client, job_id: str
) -> None:
    put(
        server,
        incident(job_id, "critical 60%", "critical", 0.6),
        incident(job_id, "hung", "critical", 0.0, "hang"),
        incident(job_id, "warning 20%", "warning", 0.2),
        incident(job_id, "warning, cost unknown", "warning", float("nan")),
        incident(job_id, "stuck for 493 ms: nothing to do", "info", 0.01, "transient_stall"),
    )
    assert get(client, job_id)["verdict"]["incident_id"] == "hung"
    names, cursor = [], None
    while True:
        parameters = {"job": job_id, "limit": 2} | ({"cursor": cursor} if cursor else {})
        page = client.get("/api/v1/incidents", params=parameters).json()
        names += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert names == [
        "hung",
        "critical 60%",
        "warning 20%",
        "warning, cost unknown",
        "stuck for 493 ms: nothing to do",
    ]


@pytest.mark.any_database
def test_a_training_job_has_a_verdict_that_is_true_of_now(
    client: httpx.Client, job_id: str
) -> None:
    job = get(client, job_id)
    assert (job["condition"], job["verdict"]["is_outdated"]) == ("training", False)
    assert job["verdict"]["lag_seconds"] < 10
    assert job["verdict"]["as_of"] is not None
    assert conditions(client, job_id) == ["running", "running"]


@pytest.mark.any_database
def test_a_verdict_that_the_analysis_has_not_confirmed_says_so(
    server: Any, client: httpx.Client, job_id: str
) -> None:
    change(server, JobRow, job_id, ticked_ns=NOW - 110 * SECOND)
    job = get(client, job_id)
    assert (job["condition"], job["verdict"]["kind"]) == ("unknown", "outdated")
    assert job["verdict"]["is_outdated"]
    behind = re.search(r"the analysis is (\d+) s behind", job["verdict"]["text"])
    assert behind is not None
    assert int(behind[1]) == pytest.approx(job["verdict"]["lag_seconds"], abs=1.0)
    assert int(behind[1]) >= 110
    assert conditions(client, job_id) == ["unknown", "unknown"]


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ({"signal": 9}, "signal 9"),
        ({"exit_code": 3}, "exit code 3"),
        ({}, "an unknown exit code"),  # an external job
    ],
)
def test_a_dead_rank_is_shown_before_its_cause_is_found(
    server: Any, client: httpx.Client, job_id: str, ending: dict[str, int], how: str
) -> None:
    change(server, RankRow, (job_id, 1), state="exited", **ending)
    job = get(client, job_id)
    assert (job["condition"], job["verdict"]["kind"]) == ("dead", "failure")
    assert job["verdict"]["text"].startswith(f"Rank 1 (node-1) has ended with {how};")
    assert conditions(client, job_id) == ["blocked", "dead"]


@pytest.mark.any_database
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_names_its_culprit_and_the_ranks_that_it_blocks(
    server: Any, client: httpx.Client, job_id: str, rank: int
) -> None:
    put(server, incident(job_id, "hung", "critical", 0.0, "hang", rank))
    assert get(client, job_id)["condition"] == "hung"
    expected = ["blocked", "blocked"]
    expected[rank] = "hung"
    assert conditions(client, job_id) == expected


def test_ranks_of_a_silent_node_are_unknown(server: Any, client: httpx.Client, job_id: str) -> None:
    change(server, NodeRow, "node-1", last_seen_ns=NOW - 60 * SECOND)
    assert get(client, job_id)["condition"] == "training"
    assert conditions(client, job_id) == ["running", "unknown"]
    change(server, NodeRow, "node-0", last_seen_ns=NOW - 60 * SECOND)
    assert get(client, job_id)["condition"] == "unknown"


@pytest.mark.any_database
@pytest.mark.parametrize("signal", [9, None])
def test_no_slowdown_is_shown_while_a_job_does_not_train(
    server: Any, client: httpx.Client, job_id: str, signal: int | None
) -> None:
    change(server, RankRow, (job_id, 0), state="exited", signal=signal, exit_code=1)
    cells = client.get(f"/api/v1/jobs/{job_id}/grid").json()["cells"]
    assert [cell["slowdown"] for cell in cells] == [None, None]
    assert [cell["condition"] for cell in cells] == ["dead", "blocked"]


@pytest.mark.any_database
def test_a_job_of_which_a_rank_has_finished_is_not_called_even(
    server: Any, client: httpx.Client, job_id: str
) -> None:
    change(server, RankRow, (job_id, 1), state="exited", exit_code=0)
    text = get(client, job_id)["verdict"]["text"]
    assert text == "Rank 1 (node-1) has ended with exit code 0; the other ranks still run."
    change(server, RankRow, (job_id, 0), state="exited", exit_code=0)
    text = get(client, job_id)["verdict"]["text"]
    assert text == "All 2 ranks have ended with exit code 0."
