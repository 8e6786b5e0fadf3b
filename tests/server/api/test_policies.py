"""Policies through the API: versions, changes, and who may approve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy.exc
from click.testing import CliRunner
from simulated_node import post_job
from sqlalchemy import text

from paceline_cli.commands.policy import policy as policy_command
from paceline_server.app import record_default_policy
from paceline_server.decide.types import ActionView
from paceline_server.store.database import Database
from paceline_server.store.models import ActionRow
from paceline_server.store.policies import newest_version
from paceline_server.store.tokens import create_token


def get(server: Any, path: str) -> Any:
    return server.client.get(f"/api/v1{path}").raise_for_status().json()


def change(server: Any, job_id: str, values: dict[str, Any], comment: str = "") -> httpx.Response:
    body = {"values": values, "comment": comment}
    return server.client.patch(f"/api/v1/jobs/{job_id}/policy", json=body)


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    return run_server(role="api")


@pytest.mark.any_database
def test_a_job_without_values_of_its_own_has_the_version_for_new_jobs(server: Any) -> None:
    [default] = get(server, "/policies")["items"]
    assert (default["job_id"], default["actor"]) == (None, "built-in policy")
    job = get(server, f"/jobs/{post_job(server.url)}")
    assert job["policy_version"] == default["version"]
    assert get(server, f"/policies?job={job['id']}")["items"] == []


def test_a_change_is_a_version_and_in_the_audit_log(server: Any) -> None:
    job_id = post_job(server.url, policy={"mode": "approve"})
    first = get(server, f"/jobs/{job_id}")["policy_version"]
    answer = change(server, job_id, {"hang_patience_seconds": 60}, "storage is slow")
    changed = answer.raise_for_status().json()
    assert changed["policy"]["hang_patience_seconds"] == 60.0
    assert changed["policy"]["mode"] == "approve", "other fields stay"
    newest, before = get(server, f"/policies?job={job_id}")["items"]
    assert (newest["version"], before["version"]) == (changed["policy_version"], first)
    assert newest["changes"] == [{"field": "hang_patience_seconds", "before": "10", "after": "60"}]
    assert before["changes"] == [{"field": "mode", "before": "default", "after": "approve"}]
    assert (newest["comment"], newest["actor"]) == ("storage is slow", "local-operator")
    assert newest["hash"] != before["hash"]
    entry = get(server, f"/audit?job={job_id}")["items"][0]
    assert (entry["actor"], entry["verb"]) == ("local-operator", "changed the policy")
    assert "hang_patience_seconds: 10 -> 60. storage is slow" in entry["detail"]
    same = change(server, job_id, {"hang_patience_seconds": 60.0}).json()
    assert same["policy_version"] == newest["version"], "the same values are no new version"


@pytest.mark.any_database
def test_invalid_values_are_refused_and_change_nothing(server: Any) -> None:
    job_id = post_job(server.url)
    answer = change(server, job_id, {"mode": "x", "patience": 3})
    assert answer.status_code == 422
    assert "expected one of default" in answer.json()["detail"]
    assert "patience is not a policy field" in answer.json()["detail"]
    assert get(server, f"/policies?job={job_id}")["items"] == []
    assert change(server, "job-0", {}).status_code == 404
    assert server.client.get("/api/v1/policies/99").status_code == 404


@pytest.mark.any_database
def test_only_approvers_may_approve_and_change_the_policy(server: Any, database: Database) -> None:
    job_id = post_job(server.url, policy={"mode": "approve", "approvers": ["alice"]})
    view = ActionView(
        action_id="act-1", kind="restart", state="proposed", reason="r", generation=1, created_ns=1
    )
    with database.write() as session:
        secret = create_token(session, "alice", "operator", 1)
        session.add(
            ActionRow(
                id="act-1",
                job_id=job_id,
                kind="restart",
                state="proposed",
                created_ns=1,
                version=1,
                noticed=True,
                view=view,
            )
        )
    refused = server.client.post("/api/v1/actions/act-1/approve")
    assert refused.status_code == 403
    assert "Only alice may decide on this job" in refused.json()["detail"]
    assert change(server, job_id, {"approvers": ""}).status_code == 403
    assert server.client.post(f"/api/v1/jobs/{job_id}/restart").status_code == 403
    alice = {"Authorization": f"Bearer {secret}"}
    decided = server.client.post("/api/v1/actions/act-1/approve", headers=alice)
    assert decided.raise_for_status().json()["decided_by"] == "alice"


@pytest.mark.any_database
def test_a_changed_policy_file_is_a_version(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    record_default_policy(database, None)
    path.write_text('mode = "approve"')
    for _ in range(2):
        record_default_policy(database, path)
    with database.read() as session:
        newest = newest_version(session)
        assert newest is not None
        assert (newest.policy.mode, newest.actor) == ("approve", "policy file policy.toml")
        count = session.scalar(text("SELECT count(*) FROM policy_versions"))
    assert count == 2


@pytest.mark.parametrize(
    "statement", ["UPDATE policy_versions SET actor = 'x'", "DELETE FROM policy_versions"]
)
def test_versions_cannot_be_changed(database: Database, statement: str) -> None:
    record_default_policy(database, None)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="append-only"), database.write() as session:
        session.execute(text(statement))


@pytest.mark.any_database
def test_the_command_line_shows_and_changes_policies(server: Any, tmp_path: Path) -> None:
    job_id = post_job(server.url)

    def run(*arguments: str, code: int = 0) -> str:
        token = server.client.headers["Authorization"].removeprefix("Bearer ")
        options = ("--server", server.url, "--token", token)
        result = CliRunner().invoke(policy_command, [*options, *arguments])
        assert result.exit_code == code, result.output
        return result.output

    assert "hang_patience_seconds" in run()
    windows = "maintenance_windows=Sat 22:00-06:00 UTC"
    assert "has policy version" in run("set", job_id, windows, "--comment", "move")
    assert "Sat 22:00-06:00 UTC" in run("show", job_id)
    assert "maintenance_windows: none -> Sat 22:00-06:00 UTC" in run("history", job_id)
    assert "is not a window" in run("set", job_id, "maintenance_windows=Sat", code=1)
    path = tmp_path / "policy.toml"
    path.write_text("lease = 3")
    assert "lease is not a policy field" in run("check", str(path), code=1)
    path.write_text("hang_patience_seconds = 3")
    assert "is valid" in run("check", str(path))
