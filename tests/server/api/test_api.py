"""The HTTP interface of a running server: resources, errors, scopes, pages."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from simulated_node import hello, post_job
from sqlalchemy import select

from paceline_server.decide.types import ActionView, IncidentView, Phase
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.ingest import writer
from paceline_server.policy import Policy
from paceline_server.steps.types import Efficiency, Ledger, RankStep, StageBubble, StepSummary
from paceline_server.store.models import (
    ActionRow,
    AuditRow,
    Base,
    IncidentRow,
    JobRow,
    NodeRow,
)
from paceline_server.store.shares import step_rows
from paceline_server.store.tokens import Scope, create_token, revoke_token
from paceline_wire.batch import AgentHello, Batch
from tests.server.rows import toy_rank

NOW = time.time_ns()


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    """A server without a worker, so that rows inserted by a test do not change."""
    return run_server(role="api")


@pytest.fixture
def client(server: Any) -> Any:
    return server.client


def node(agent_id: str, *, of: AgentHello | None = None, reason: str | None = None) -> NodeRow:
    """Return a node that is not lost during a test; `reason`: of its quarantine."""
    return NodeRow(
        agent_id=agent_id,
        boot_id="boot",
        sequence=0,
        packed_ns=NOW,
        last_seen_ns=time.time_ns() + 600_000_000_000,
        hello=of or hello(),
        readings={},
        dropped_batches=0,
        quarantine_reason=reason,
    )


def put(server: Any, *rows: Any) -> None:
    with server.program.database.write() as session:
        session.add_all(rows)


def incident(job_id: str, number: int, state: Any = "open", **changes: Any) -> IncidentRow:
    finding = Finding(
        kind="straggler",
        cause="thermal throttle",
        fingerprint=f"f{number}",
        summary="Rank 2 is 2.5x slower: thermal throttle on node-1.",
        detected_ns=NOW + number,
        generation=1,
        rank=2,
        slowdown=2.5,
        cost_ratio=float("nan"),
        evidence=[Evidence("SM clock fell", "DCGM_FI_DEV_SM_CLOCK", 795.0, 1980.0)],
    )
    finding = replace(finding, **changes)
    view = IncidentView(
        incident_id=f"inc-{number}", finding=finding, state=state, opened_ns=NOW + number
    )
    return IncidentRow(
        id=view.incident_id,
        job_id=job_id,
        kind=finding.kind,
        severity=finding.severity,
        state=state,
        opened_ns=view.opened_ns,
        view=view,
    )


def action(job_id: str, number: int = 1) -> ActionRow:
    view = ActionView(
        action_id=f"act-{number}",
        kind="restart",
        state="proposed",
        reason="Restart without node-1.",
        generation=1,
        created_ns=NOW + number,
        parameters={"secret": 1},
    )
    return ActionRow(
        id=view.action_id,
        job_id=job_id,
        kind=view.kind,
        state=view.state,
        created_ns=view.created_ns,
        version=1,
        noticed=True,
        view=view,
    )


def step(job_id: str, number: int, generation: int = 1, slowdown: float = 1.0) -> list[Base]:
    shares = [
        RankStep(0, 0.5, 0.3, 0.3, 0.1, 0.0, 0.05, 0.0, 0.01, 0.0, 0.0, 1.0),
        RankStep(1, 0.5, 0.3, 0.3, 0.1, 0.0, 0.05, 0.0, 0.01, 0.0, 0.0, slowdown),
    ]
    summary = StepSummary(
        generation=generation,
        step=number,
        started_ns=NOW,
        duration_seconds=0.5,
        loss=float("nan"),
        ranks=shares,
        bubbles=[StageBubble(0, 0.2, None)],
        slowest_rank=1,
    )
    return [table(**row) for table, row in step_rows(job_id, summary).items()]


def test_a_job_is_created_pending_and_listed_newest_first(client: httpx.Client) -> None:
    ids = [post_job(str(client.base_url).rstrip("/"), dp=1) for _ in range(3)]
    job = client.get(f"/api/v1/jobs/{ids[0]}").json()
    assert (job["state"], job["verdict"]["kind"]) == ("pending", "starting")
    page = client.get("/api/v1/jobs", params={"limit": 2}).json()
    rest = client.get("/api/v1/jobs", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [each["id"] for each in page["items"] + rest["items"]] == ids[::-1]
    assert rest["next_cursor"] is None


ERRORS: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/api/v1/jobs/nope", None, 404, "no job 'nope'"),
    ("GET", "/api/v1/jobs/a%00b/ranks", None, 404, "no job"),
    ("GET", "/api/v1/incidents/nope", None, 404, "no incident"),
    ("GET", "/api/v1/actions/nope", None, 404, "no action"),
    ("POST", "/api/v1/actions/nope/approve", None, 404, "no action"),
    ("POST", "/api/v1/nodes/nope/release", None, 404, "no node"),
    ("POST", "/api/v1/nodes/a%00b/release", None, 404, "no node"),
    ("POST", "/api/v1/nodes/a%00b/burst", {}, 404, "no node"),
    ("POST", "/api/v1/jobs/nope/stop", None, 404, "no job"),
    ("POST", "/api/v1/jobs/a%00b/stop", None, 404, "no job"),
    ("POST", "/api/v1/jobs/nope/restart", None, 404, "no job"),
    ("POST", "/api/v1/jobs/nope/restart", {"exclude_nodes": "node-1"}, 422, "exclude_nodes"),
    ("GET", "/api/v1/events?job=nope", None, 404, "no job"),
    ("GET", "/api/v1/jobs?cursor=%21%21", None, 400, "next_cursor"),
    ("GET", "/api/v1/jobs?cursor=bm8", None, 400, "next_cursor"),
    ("GET", "/api/v1/jobs?cursor=%C3%A9", None, 400, "next_cursor"),
    ("GET", "/api/v1/jobs?limit=0", None, 422, "limit"),
    ("GET", "/api/v1/incidents?state=weird", None, 422, "state"),
    ("POST", "/api/v1/jobs", {"name": "x"}, 422, "argv"),
    (
        "POST",
        "/api/v1/jobs",
        {"name": "x", "argv": ["true"], "topology": {"dp": 65536, "pp": 1024, "tp": 1024}},
        422,
        "at most 131072 ranks, got 68719476736",
    ),
    ("POST", "/api/v1/jobs", {"name": "x" * (2 << 20)}, 413, "exceeds 1048576 bytes"),
    ("GET", "/api/v1/nothing", None, 404, "Not Found"),
    ("DELETE", "/api/v1/jobs", None, 405, "Expected one of GET, POST, OPTIONS"),
]


def test_errors_are_problems_with_a_sentence(client: httpx.Client) -> None:
    for method, path, body, status, says in ERRORS:
        answer = client.request(method, path, json=body)
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == status
        assert says in problem["detail"], path


@pytest.mark.any_database
def test_json_without_content_type_is_rejected(client: httpx.Client) -> None:
    """`curl -d` sends such requests."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post("/api/v1/jobs", content=b"{}", headers=form)
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "body: expected application/json, got application/x-www-form-urlencoded.",
    )
    assert "argv" not in client.post("/api/v1/jobs", content=b"").json()["detail"]


def test_text_with_nul_is_rejected(client: httpx.Client) -> None:
    body = {"name": "x", "argv": ["true"], "topology": {"dp": 1, "pp": 1, "tp": 1}}
    for field in ("name", "directory"):
        answer = client.post("/api/v1/jobs", json=body | {field: "a\0b"})
        assert answer.status_code == 422
        assert field in answer.json()["detail"]


@pytest.mark.any_database
def test_start_timeout_is_set_per_job(server: Any, client: httpx.Client) -> None:
    url = str(client.base_url).rstrip("/")
    jobs = {post_job(url): 900.0, post_job(url, start_timeout_seconds=30): 30.0}
    with server.program.database.read() as session:
        found = {
            job.id: job.policy.start_timeout_seconds for job in session.scalars(select(JobRow))
        }
    assert found == jobs
    body = {"name": "x", "argv": ["true"], "topology": {}, "start_timeout_seconds": 0}
    assert client.post("/api/v1/jobs", json=body).status_code == 422


@pytest.mark.any_database
def test_a_repeated_request_creates_no_second_job(client: httpx.Client) -> None:
    body = {"name": "x", "argv": ["true"], "topology": {"dp": 1, "pp": 1, "tp": 1}}

    def post(key: str, **changes: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return client.post("/api/v1/jobs", json=body | changes, headers=headers)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, ["one"] * 4))
    assert [each.status_code for each in answers] == [201] * 4
    assert len({each.json()["id"] for each in answers}) == 1
    assert post("two").json()["id"] != answers[0].json()["id"]
    other = post("one", argv=["false"])
    assert other.status_code == 422
    assert "Idempotency-Key" in other.json()["detail"]
    assert len(client.get("/api/v1/jobs").json()["items"]) == 2


@pytest.mark.any_database
def test_a_job_has_the_policy_of_its_request(client: httpx.Client) -> None:
    body = {"name": "x", "argv": ["true"], "topology": {"dp": 1, "pp": 1, "tp": 1}}
    given = {"hang_patience_seconds": 60, "mode": "approve"}
    created = client.post("/api/v1/jobs", json=body | {"policy": given}).json()
    shown = client.get(f"/api/v1/jobs/{created['id']}").json()
    assert shown["mode"] == "approve"
    policy = Policy(mode="approve", hang_patience_seconds=60.0)
    assert shown["policy"] == msgspec.json.decode(msgspec.json.encode(policy))


@pytest.mark.any_database
def test_a_job_has_the_policy_of_the_server_unless_the_request_differs(
    run_server: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('mode = "approve"\nrestarts_per_day = 7\n')
    url = run_server(role="api", policy=path).url
    job_id = post_job(url, mode="dry-run", policy={"backoff_seconds": 2})
    job = httpx.get(f"{url}/api/v1/jobs/{job_id}", verify=False, timeout=60).json()
    policy = Policy(mode="dry-run", restarts_per_day=7, backoff_seconds=2.0)
    assert job["policy"] == msgspec.json.decode(msgspec.json.encode(policy))


@pytest.mark.any_database
@pytest.mark.parametrize(("lease", "warns"), [("3", True), ("600", False), ("0", False)])
def test_an_agent_lease_not_above_the_node_lease_is_logged(
    server: Any, caplog: pytest.LogCaptureFixture, lease: str, warns: bool
) -> None:
    agent = replace(hello(), labels={"lease_seconds": lease})
    put(server, node("node-0", of=agent))
    post_job(server.url)
    assert ("start them with a longer --lease-seconds" in caplog.text) == warns


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        (
            {"policy": {"mode": "manual"}},
            "policy: mode: expected one of default, observe,",
        ),
        ({"policy": {"patience": 1}}, "policy: patience is not a policy field"),
        (
            {"mode": "auto", "policy": {"mode": "observe"}},
            "mode: expected one value, got auto and observe.",
        ),
    ],
)
def test_an_invalid_policy_is_refused(
    client: httpx.Client, fields: dict[str, object], detail: str
) -> None:
    body = {"name": "x", "argv": ["true"], "topology": {"dp": 1, "pp": 1, "tp": 1}}
    answer = client.post("/api/v1/jobs", json=body | fields)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)


def test_steps_show_the_newest_run_of_each(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url, dp=2)
    put(server, *(row for number in range(6) for row in step(job_id, number)))
    put(server, *(row for number in (4, 5, 6) for row in step(job_id, number, generation=2)))
    path = f"/api/v1/jobs/{job_id}/steps"
    every = client.get(path).json()["items"]
    assert [(each["step"], each["generation"]) for each in every] == [
        *((number, 1) for number in range(4)),
        *((number, 2) for number in (4, 5, 6)),
    ]
    assert every[0]["loss"] is None, "NaN is no JSON"
    assert every[0]["compute_seconds"] == pytest.approx(0.3)
    newest = client.get(path, params={"limit": 2}).json()["items"]
    assert [each["step"] for each in newest] == [5, 6]
    later = client.get(path, params={"after": 1, "limit": 3}).json()
    assert [each["step"] for each in later["items"]] == [2, 3, 4]
    rest = client.get(path, params={"after": 1, "limit": 3, "cursor": later["next_cursor"]}).json()
    assert [each["step"] for each in rest["items"]] == [5, 6]
    assert rest["next_cursor"] is None


def test_the_grid_shows_each_rank_over_the_last_steps(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url, dp=2)
    put(
        server,
        *(row for number in range(5) for row in step(job_id, number, generation=0, slowdown=2.0)),
    )
    grid = client.get(f"/api/v1/jobs/{job_id}/grid", params={"steps": 3}).json()
    assert (grid["first_step"], grid["last_step"]) == (2, 4)
    assert [cell["slowdown"] for cell in grid["cells"]] == [1.0, 2.0]
    assert [cell["dp_rank"] for cell in grid["cells"]] == [0, 1]


def test_incidents_are_filtered_and_carry_their_evidence(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url)
    put(server, incident(job_id, 1, "resolved"), incident(job_id, 2))
    found = client.get("/api/v1/incidents", params={"job": job_id, "state": "open"}).json()
    (shown,) = found["items"]
    assert shown["id"] == "inc-2"
    assert shown["cost_ratio"] is None
    assert shown["evidence"][0]["expected"] == 1980.0
    assert client.get("/api/v1/incidents", params={"job": "other"}).json()["items"] == []


def test_a_rank_that_shares_the_verdict_of_another_one_is_no_symptom_of_it(
    server: Any, client: httpx.Client
) -> None:
    job_id = post_job(server.url)
    row = incident(job_id, 1)
    main = row.view.finding
    other = replace(main, rank=3, fingerprint="f3")
    bubble = replace(main, kind="bubble", summary="Stage 0 idles.")
    row.view = replace(row.view, symptoms=[other, bubble])
    put(server, row)
    shown = client.get(f"/api/v1/incidents/{row.id}").json()
    assert shown["symptoms"] == ["Stage 0 idles."]


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("metadata", "spent", "sentence"),
    [
        (
            {"communication_not_recorded": "torch 2.4.1 is older than 2.6"},
            {"communication_seconds": 1.0},
            "Communication is not recorded: torch 2.4.1 is older than 2.6, so waits count as "
            "compute.",
        ),
        (
            {},
            {},
            "No communication between the ranks was recorded, so waits, if there are any, count as "
            "compute.",
        ),
        ({}, {"communication_seconds": 1.0}, None),
        ({}, {"bubble_seconds": 1.0}, None),
    ],
)
def test_a_job_whose_communication_is_not_seen_is_not_called_even(
    server: Any,
    client: httpx.Client,
    metadata: dict[str, str],
    spent: dict[str, float],
    sentence: str | None,
) -> None:
    job_id = post_job(server.url)
    put(
        server,
        *(row for number in range(5) for row in step(job_id, number, generation=0, slowdown=1.03)),
    )
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step, job.step_seconds = "running", 50, 0.5612
        job.ledger = Ledger(compute_seconds=20.0, **spent)
        job.spec = replace(job.spec, metadata=metadata)
    shown = client.get(f"/api/v1/jobs/{job_id}").json()
    assert shown["unrecorded_communication"] == sentence
    if sentence is None:
        assert shown["verdict"]["text"].startswith("All 2 ranks within 3% of their peers")
    else:
        assert shown["verdict"]["kind"] == "unobserved"
        text = f"{sentence} A slow rank may not be found; 0.56 s per step."
        assert shown["verdict"]["text"] == text


def test_a_healthy_verdict_counts_the_ranks_that_were_compared(
    server: Any, client: httpx.Client
) -> None:
    job_id = post_job(server.url, dp=3)
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step = "running", 4
    put(server, *(row for number in range(5) for row in step(job_id, number, generation=0)))
    text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
    assert text == "2 of 3 ranks were compared and are within 1% of their peers."


def test_the_verdict_is_the_worst_open_incident(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url)
    put(server, incident(job_id, 1, "resolved"))
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step, job.step_seconds = "running", 5, 0.5612
    verdict = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]
    assert verdict == {
        "kind": "healthy",
        "text": "No problem found; 0.56 s per step.",
        "incident_id": None,
        "as_of": None,
        "lag_seconds": None,
        "is_outdated": False,
    }
    put(
        server,
        *(row for number in range(5) for row in step(job_id, number, generation=0, slowdown=1.03)),
    )
    text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
    assert text == "All 2 ranks within 3% of their peers; 0.56 s per step."
    with server.program.database.write() as session:
        session.get_one(JobRow, job_id).ledger = Ledger(wall_seconds=10.0, imbalance_seconds=2.5)
    text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
    some = "ranks that took longer in some cost 25% of the time (imbalance)"
    assert text == f"No rank is slow in most steps, but {some}; 0.56 s per step."
    with server.program.database.write() as session:
        session.get_one(JobRow, job_id).ledger = Ledger()
    put(
        server,
        *(row for number in range(5, 40) for row in step(job_id, number, 0, slowdown=0.6)),
    )
    text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
    assert text == "No slow rank found; 0.56 s per step.", "a rank is much faster than its peers"
    for seconds, pace in ((0.0112, "11 ms"), (0.0034, "3.4 ms")):
        with server.program.database.write() as session:
            session.get_one(JobRow, job_id).step_seconds = seconds
        text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
        assert text == f"No slow rank found; {pace} per step."
    put(server, incident(job_id, 2))
    verdict = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]
    assert verdict["incident_id"] == "inc-2"
    assert verdict["text"].startswith("Rank 2 is 2.5x slower")


@pytest.mark.any_database
def test_verdict_reports_the_outcome_of_the_job(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url)

    def verdict(state: str) -> tuple[str, str | None]:
        with server.program.database.write() as session:
            job = session.get_one(JobRow, job_id)
            job.state, job.step, job.generation = state, 5, 1  # type: ignore[assignment]
        found = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]
        return found["text"], found["incident_id"]

    waiting, _ = verdict("pending")
    assert waiting.startswith("Waiting for 2 free rank slots on ready nodes: start `paceline a")
    assert verdict("recovering") == ("Restarting after generation 1.", None)
    all_ended = "Failed at step 5. All ranks have exited and no restart is planned."
    assert verdict("failed") == (all_ended, None)
    put(server, incident(job_id, 1))
    summary = "Rank 2 is 2.5x slower: thermal throttle on node-1."
    assert verdict("recovering") == (f"Restarting. {summary}", "inc-1")
    assert verdict("failed") == (f"Failed at step 5. {summary}", "inc-1")
    stop = action(job_id)
    stop.kind = "stop"
    stop.view = replace(stop.view, kind="stop", reason="Gave up: 10 restarts within an hour.")
    put(server, stop)
    assert verdict("failed") == ("Failed at step 5. Gave up: 10 restarts within an hour.", "inc-1")


@pytest.mark.any_database
@pytest.mark.parametrize(("state", "how"), [("finished", "Finished"), ("stopped", "Stopped")])
def test_the_verdict_of_a_job_that_is_over_has_what_lasted_to_its_end(
    server: Any, client: httpx.Client, state: str, how: str
) -> None:
    job_id = post_job(server.url)
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step, job.generation, job.created_ns = state, 5, 1, NOW  # type: ignore[assignment]

    def verdict(*rows: IncidentRow) -> tuple[str, str | None]:
        put(server, *rows)
        found = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]
        assert found["kind"] == state
        return found["text"], found["incident_id"]

    over = incident(job_id, 1, state="resolved", cleared=True)
    information = incident(job_id, 2, state="resolved", severity="info")
    repaired = incident(job_id, 3, state="resolved", generation=0)
    assert verdict(over, information, repaired) == (f"{how} at step 5.", None)
    summary = "Rank 2 is 2.5x slower: thermal throttle on node-1."
    earlier_run = incident(job_id, -1, state="resolved")
    assert verdict(earlier_run) == (f"{how} at step 5.", None)
    waited = incident(job_id, 6, state="resolved", severity="info", kind="hang", summary="Waits.")
    assert verdict(waited) == (f"{how} at step 5. Waits.", "inc-6")
    with server.program.database.write() as session:
        session.delete(session.get_one(IncidentRow, "inc-6"))
    lasting = incident(job_id, 4, state="resolved", cost_ratio=0.4)
    assert verdict(lasting) == (f"{how} at step 5. {summary}", "inc-4")
    milder = incident(job_id, 5, state="resolved", cost_ratio=0.1)
    text = f"{how} at step 5. {summary} 1 other problem lasted to the end, too."
    assert verdict(milder) == (text, "inc-4")


@pytest.mark.any_database
def test_large_responses_are_compressed_and_streams_are_not(client: httpx.Client) -> None:
    assert client.get("/openapi.json").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in client.get("/api/v1/jobs").headers
    plain = client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with client.stream("GET", "/api/v1/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in stream.headers


@pytest.mark.any_database
def test_the_verdict_does_not_compare_a_rank_with_itself(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url, dp=1)
    put(server, *(row for number in range(5) for row in step(job_id, number, generation=0)))
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.state, job.step, job.step_seconds = "running", 5, 0.5
    text = client.get(f"/api/v1/jobs/{job_id}").json()["verdict"]["text"]
    assert text == "No problem found; 0.50 s per step."


@pytest.mark.any_database
def test_a_restart_that_a_person_requests_is_an_approved_action(
    server: Any, client: httpx.Client
) -> None:
    job_id = post_job(server.url)
    path = f"/api/v1/jobs/{job_id}/restart"
    waits = client.post(path)
    assert waits.status_code == 409
    assert "waits for nodes" in waits.json()["detail"]
    with server.program.database.write() as session:
        session.get_one(JobRow, job_id).state = "running"
        session.add(toy_rank(job_id, 0, "node-2", generation=0))
    unknown = client.post(path, json={"exclude_nodes": ["node-9", "a\0b"]})
    assert (unknown.status_code, "node-9" in unknown.text) == (422, True)
    body = {"exclude_nodes": ["node-2", "node-2"], "comment": "its NIC flaps"}
    answer = client.post(path, json=body)
    assert answer.status_code == 202
    found = answer.json()
    assert (found["kind"], found["state"], found["exclude_nodes"]) == (
        "restart",
        "approved",
        ["node-2"],
    )
    assert found["reason"].startswith("Checkpoint and restart without node-2: requested by ")
    assert found["reason"].endswith(": its NIC flaps.")
    again = client.post(path, json=body)
    assert again.status_code == 409
    assert found["id"] in again.json()["detail"]
    assert again.json()["detail"].endswith("Wait until it is done.")
    verbs = [one["verb"] for one in client.get(f"/api/v1/audit?job={job_id}").json()["items"]]
    assert verbs[0] == "requested"


@pytest.mark.any_database
def test_only_a_running_job_of_a_known_launcher_is_restarted_on_request(
    server: Any, client: httpx.Client
) -> None:
    job_id = post_job(server.url)
    path = f"/api/v1/jobs/{job_id}/restart"
    for state, watched, why in (
        ("finished", False, "is finished"),
        ("running", True, "restart it where it was started"),
    ):
        with server.program.database.write() as session:
            job = session.get_one(JobRow, job_id)
            job.state, job.watched = state, watched
        refused = client.post(path)
        assert refused.status_code == 409
        assert why in refused.json()["detail"]


def test_action_is_decided_once(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url)
    put(server, action(job_id))
    answer = client.post("/api/v1/actions/act-1/approve", json={"comment": "go"})
    assert answer.json()["state"] == "approved"
    assert "secret" not in answer.text
    again = client.post("/api/v1/actions/act-1/reject")
    assert again.status_code == 409
    with server.program.database.read() as session:
        row = session.get_one(ActionRow, "act-1")
        assert (row.state, row.version, row.noticed) == ("approved", 2, False)
        assert session.scalars(
            select(AuditRow.detail).where(AuditRow.verb == "approved")
        ).all() == ["go"]


@pytest.mark.any_database
def test_a_restart_that_waits_for_a_checkpoint_can_be_rejected(
    server: Any, client: httpx.Client
) -> None:
    job_id = post_job(server.url)
    waiting = action(job_id)
    phases = [Phase("wait", NOW, "Waiting for the script's own next checkpoint.")]
    waiting.state, waiting.restart_of = "running", 1
    waiting.view = replace(waiting.view, state="running", phases=phases)
    stopping = action(job_id, 2)
    stopping.state = "running"
    later = [*phases, Phase("stop", NOW, "Stopping all ranks.")]
    stopping.view = replace(stopping.view, state="running", phases=later)
    put(server, waiting, stopping)
    shown = client.get("/api/v1/actions").json()["items"]
    assert [one["can_be_rejected"] for one in shown] == [False, True]
    assert client.post("/api/v1/actions/act-1/approve").status_code == 409
    assert client.post("/api/v1/actions/act-2/reject").status_code == 409
    assert client.post("/api/v1/actions/act-1/reject").json()["state"] == "rejected"
    with server.program.database.read() as session:
        row = session.get_one(ActionRow, "act-1")
        assert (row.state, row.restart_of, row.noticed) == ("rejected", None, False)
        assert row.view.finished_ns is not None


def test_a_quarantined_node_is_released(server: Any, client: httpx.Client) -> None:
    put(server, node("node-1", reason="throttles"))
    (shown,) = client.get("/api/v1/nodes").json()["items"]
    assert (shown["state"], shown["reason"]) == ("quarantined", "throttles")
    assert client.post("/api/v1/nodes/node-1/release").json()["state"] == "ready"
    client.post("/api/v1/nodes/node-1/release").raise_for_status()
    records = client.get("/api/v1/audit").json()["items"]
    assert [one["verb"] for one in records if one["subject"] == "node-1"] == ["released"]


def tokens(server: Any) -> dict[Scope, str]:
    with server.program.database.write() as session:
        scopes: tuple[Scope, ...] = ("agent", "viewer", "operator")
        return {scope: create_token(session, f"a-{scope}", scope, NOW) for scope in scopes}


READ = ("GET", "/api/v1/jobs")
STOP = ("POST", "/api/v1/jobs/nope/stop")
COMMANDS = ("GET", "/api/v1/agents/node-0/commands")


ALLOWED: dict[Scope | None, dict[Any, int]] = {
    None: {READ: 401, STOP: 401, COMMANDS: 401},
    "agent": {READ: 403, STOP: 403, COMMANDS: 200},
    "viewer": {READ: 200, STOP: 403, COMMANDS: 403},
    "operator": {READ: 200, STOP: 404, COMMANDS: 403},
}


@pytest.mark.any_database
def test_scope_grants_only_its_own_routes(server: Any, client: httpx.Client) -> None:
    made = tokens(server)
    del client.headers["Authorization"]
    for scope, allowed in ALLOWED.items():
        headers = {} if scope is None else {"Authorization": f"Bearer {made[scope]}"}
        for (method, path), status in allowed.items():
            with client.stream(method, path, headers=headers) as answer:
                assert answer.status_code == status, (scope, path)
                assert ("www-authenticate" in answer.headers) == (status == 401)
    assert client.get("/healthz").status_code == 200
    assert client.get("/metrics").status_code == 200


@pytest.mark.any_database
def test_revoked_token_is_rejected_within_a_second(
    server: Any, client: httpx.Client, wait_for: Callable[..., Any]
) -> None:
    headers = {"Authorization": f"Bearer {tokens(server)['viewer']}"}
    assert client.get("/api/v1/jobs", headers=headers).status_code == 200
    with server.program.database.write() as session:
        for scope in ("agent", "viewer", "operator"):
            assert revoke_token(session, f"a-{scope}", NOW)
    wait_for(lambda: client.get("/api/v1/jobs", headers=headers).status_code == 401, "the end")
    del client.headers["Authorization"]
    assert client.get("/api/v1/jobs").status_code == 401, "revoking the last opens no door"


@pytest.mark.any_database
def test_tokens_are_kept_as_hashes(server: Any) -> None:
    made = tokens(server)
    with server.program.database.read() as session:
        rows = session.connection().exec_driver_sql("SELECT * FROM tokens").all()
    assert not any(secret in str(rows) for secret in made.values())


def test_metrics_show_jobs_and_incidents(server: Any, client: httpx.Client) -> None:
    job_id = post_job(server.url)
    put(server, incident(job_id, 1))
    text = client.get("/metrics").text
    assert 'paceline_jobs{state="pending"} 1.0' in text
    assert 'paceline_incidents_open{kind="straggler"} 1.0' in text
    (verdict,) = [line for line in text.splitlines() if line.startswith("paceline_incident_info{")]
    assert f'job_id="{job_id}",kind="straggler"' in verdict
    ledger = rf'paceline_job_ledger_seconds{{job="[^"]*",job_id="{job_id}",part="(\w+)'
    parts = re.findall(ledger, text)
    assert {"compute", "communication", "bubble", "lost", "restart", "idle"} <= set(parts)


def finished_run(server: Any, ranks: int, created_ns: int, **figures: float | None) -> str:
    job_id = post_job(server.url, dp=ranks)
    with server.program.database.write() as session:
        job = session.get_one(JobRow, job_id)
        job.created_ns, job.name = created_ns, "scaled"
        job.ledger = Ledger(efficiency=Efficiency(steps=20, **figures))
    return job_id


def test_scaling_is_measured_against_the_smallest_earlier_run(
    server: Any, client: httpx.Client
) -> None:
    """By hand: 1000 tokens/s on 2 ranks are 500 per rank, 3600 on 8 ranks are 450: 90%."""
    runs = [
        finished_run(server, 2, 1, tokens_per_second=2000.0),  # not the newest of its size
        finished_run(server, 2, 2, tokens_per_second=1000.0, samples_per_second=7.0),
        finished_run(server, 4, 3, tokens_per_second=1900.0),
        finished_run(server, 1, 4, samples_per_second=3.0),  # tokens were not counted
        finished_run(server, 8, 5, tokens_per_second=3600.0),
        finished_run(server, 1, 6, tokens_per_second=510.0),  # later
    ]
    found = [client.get(f"/api/v1/jobs/{job_id}").json()["efficiency"] for job_id in runs]
    assert found[4]["scaling"] == {
        "efficiency_ratio": pytest.approx(0.9),
        "ranks": 8,
        "base_ranks": 2,
        "base_job_id": runs[1],
        "compared": "tokens_per_second",
    }
    assert found[0]["scaling"] is None
    assert found[3]["scaling"] is None
    text = client.get("/metrics").text
    figure = rf'^paceline_job_tokens_per_second{{job="scaled",job_id="{runs[4]}"}} 3600.0$'
    assert re.search(figure, text, re.MULTILINE)


def test_scaling_is_not_measured_against_another_model(server: Any, client: httpx.Client) -> None:
    """One model needs 6e9 FLOPs per token, the other one 24e9."""
    small, large, unknown = (
        {"tokens_per_second": 1000.0, "model_flops_per_second": 6e12},
        {"tokens_per_second": 900.0, "model_flops_per_second": 21.6e12},
        {"tokens_per_second": 950.0},
    )
    runs = [
        finished_run(server, ranks, number, **figures)
        for number, (ranks, figures) in enumerate(
            [(1, small), (2, large), (4, large), (4, small), (4, unknown)]
        )
    ]
    scaling = [client.get(f"/api/v1/jobs/{one}").json()["efficiency"]["scaling"] for one in runs]
    assert scaling[1] is None
    assert [one["base_job_id"] for one in scaling[2:]] == [runs[1], runs[0], runs[0]]


def test_metrics_show_the_newest_step_of_each_job(server: Any, client: httpx.Client) -> None:
    job_id, started = post_job(server.url, dp=2), post_job(server.url, dp=2)
    for number, slowdown in ((3, 9.0), (4, 1.5)):
        put(server, *step(job_id, number, generation=0, slowdown=slowdown))
    text = client.get("/metrics").text
    pattern = (
        rf'paceline_job_rank_slowdown_ratio{{job="[^"]*",job_id="{job_id}",rank="(\d)"}} (\S+)'
    )
    assert dict(re.findall(pattern, text)) == {"0": "1.0", "1": "1.5"}
    bubble = (
        rf'paceline_job_stage_bubble_ratio{{[^}}]*job_id="{job_id}",kind="measured",stage="0"}}'
    )
    assert re.search(rf"{bubble} 0\.2$", text, re.MULTILINE)
    assert not re.search(rf'^paceline_job_rank_slowdown.*"{started}"', text, re.MULTILINE)


@pytest.mark.any_database
def test_metrics_are_openmetrics_if_requested(client: httpx.Client) -> None:
    asked = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=asked)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in openmetrics(answer.text)} >= {"paceline_jobs"}
    assert "# EOF" not in client.get("/metrics").text


@pytest.mark.any_database
def test_readyz_lists_what_is_missing(client: httpx.Client) -> None:
    assert client.get("/readyz").json() == {"ready": True, "missing": []}


@pytest.mark.any_database
def test_readyz_reports_a_dead_or_hung_log_writer(
    run_server: Callable[..., Any],
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "_STALLED_SECONDS", 0.2)
    server = run_server(database_timeout_seconds=60.0)

    def missing() -> list[str]:
        return server.client.get("/readyz").json()["missing"]

    batch = Batch(agent_id="node-1", boot_id="boot", sequence=1, packed_ns=1)
    with server.program.database.write():
        answer = server.program.log.submit(batch, b"", 1)
        wait_for(lambda: "log writer: stalled" in missing(), "readyz to report it")
    answer.result(60)
    wait_for(lambda: missing() == [], "the end of it")
    server.program.log.stop()
    assert missing() == ["log writer: not running"]


@pytest.mark.any_database
def test_head_probe_gets_the_status_of_get(server: Any, client: httpx.Client) -> None:
    assert client.head("/readyz").status_code == 200
    parts = server.app.state.parts
    server.app.state.parts = dataclasses.replace(parts, unready=lambda: ["worker: stalled"])
    assert client.head("/readyz").status_code == 503
    assert [client.head(path).status_code for path in ("/healthz", "/metrics")] == [200, 200]


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("method", "path", "status", "header"),
    [
        ("POST", "/healthz", 405, {"allow": "GET, HEAD, OPTIONS"}),
        ("PUT", "/api/v1/agents/node-1/commands", 405, {"allow": "GET, OPTIONS"}),
        ("GET", "/api/v1/jobs/", 307, {"location": "http://127.0.0.1/api/v1/jobs"}),
        ("POST", "/api/v1/nothing", 404, {}),
    ],
)
def test_static_files_do_not_shadow_the_api(
    client: httpx.Client, method: str, path: str, status: int, header: dict[str, str]
) -> None:
    answer = client.request(method, path, headers={"Host": "127.0.0.1"})
    assert answer.status_code == status
    assert header.items() <= answer.headers.items()


@pytest.mark.any_database
def test_page_is_served_for_every_view(run_server: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<p>page")
    (tmp_path / "static" / "assets" / "a.js").write_text("1")
    url = run_server(role="api", static_directory=tmp_path / "static").url
    for path in ("/", "/jobs/job-1", "/jobs/llama-3.1"):
        answer = httpx.get(url + path, timeout=60)
        assert (answer.status_code, answer.text) == (200, "<p>page")
        assert answer.headers["cache-control"] == "no-cache"
    assert "immutable" in httpx.get(url + "/assets/a.js", timeout=60).headers["cache-control"]
    assert httpx.get(url + "/assets/gone.js", timeout=60).status_code == 404
    assert httpx.get(url + "/favicon.ico", timeout=60).status_code == 404
    assert httpx.get(url + "/api/v1/nothing", timeout=60).status_code == 404
