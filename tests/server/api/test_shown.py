"""Output of `paceline jobs`, `incidents` and `actions` with a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded_job import Recorded
from simulated_finding import SUMMARY, open_incident
from simulated_job import JOB

from paceline_server.decide.types import ActionView
from paceline_server.store import models
from paceline_server.store.tokens import create_token
from paceline_wire.local_token import STATE_DIRECTORY

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def troubled(recorded: Recorded) -> Recorded:
    """A job whose rank 5 is slow, with a proposed restart."""
    action = ActionView(
        action_id="act-1",
        kind="restart",
        state="proposed",
        reason="Restart without node-2.",
        generation=1,
        created_ns=1,
        incident_id="inc-1",
    )
    with recorded.server.program.database.write() as session:
        session.get_one(models.JobRow, JOB).step = 7
        session.add(open_incident("act-1"))
        session.add(
            models.ActionRow(
                id="act-1",
                job_id=JOB,
                incident_id="inc-1",
                kind="restart",
                state="proposed",
                created_ns=1,
                version=0,
                noticed=True,
                view=action,
            )
        )
    return recorded


def lines(recorded: Recorded, *words: str) -> list[str]:
    result = recorded.paceline(*words)
    assert result.exit_code == 0, result.output
    return [line.strip() for line in result.stdout.splitlines()]


def refusal(recorded: Recorded, *words: str) -> str:
    result = recorded.paceline(*words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    return result.stderr.strip()


def test_each_command_leads_to_the_next_and_speaks_json(troubled: Recorded) -> None:
    def output_of(*words: str) -> Any:
        return json.loads(troubled.paceline(*words, "--json").stdout)

    server = f"--server {troubled.server.url}"
    job = lines(troubled, "jobs", "show", JOB)
    assert job[0] == SUMMARY
    following = job[job.index("Next:") + 1 :]
    assert [line.split("  ")[0] for line in following] == [
        f"paceline actions --job {JOB} --state proposed {server}",
        f"paceline incidents show inc-1 {server}",
        f"paceline analyze {JOB} {server}",
        f"paceline jobs stacks {JOB} {server}",
    ]
    assert output_of("incidents", "--job", JOB)[0]["id"] == "inc-1"
    incident = lines(troubled, "incidents", "show", "inc-1")
    assert "90%  thermal throttle" in incident
    approve = f"paceline actions approve act-1 {server}"
    assert any(line.startswith(approve) for line in incident)
    assert any(line.startswith(approve) for line in lines(troubled, "actions", "show", "act-1"))
    assert lines(troubled, "actions", "approve", "act-1") == ["act-1 is approved"]
    assert "Next:" not in lines(troubled, "actions", "show", "act-1")
    assert "only a proposed action can be approved" in refusal(
        troubled, "actions", "reject", "act-1"
    )
    assert output_of("actions", "--state", "approved")[0]["id"] == "act-1"
    assert [job["id"] for job in output_of("jobs")] == [JOB]
    assert output_of("jobs", "stop", JOB)["verdict"]["text"] == SUMMARY


def test_a_restart_is_requested_once(recorded: Recorded) -> None:
    restart = ("jobs", "restart", JOB, "--comment", "its NIC flaps", "--timeout", "0")
    reason, state, *following = lines(recorded, *restart)
    assert reason.startswith("Checkpoint and restart in place: requested by ")
    assert state.endswith(" is approved")
    assert f"paceline actions show {state.split()[0]} " in following[-1]
    assert "Wait until it is done." in refusal(recorded, *restart)
    assert "no rank on node-9" in refusal(recorded, *restart, "--exclude", "node-9")


def test_missing_resources_are_reported(recorded: Recorded) -> None:
    shown = lines(recorded, "jobs", "show", JOB)
    assert not any("None" in line for line in shown)  # no step has finished
    assert not any(line.startswith("paceline analyze") for line in shown)
    assert lines(recorded, "incidents", "--state", "resolved") == ["No incident is resolved."]
    assert lines(recorded, "incidents") == ["No incident: nothing was found to be wrong."]
    for words, lister in (
        ("jobs show nope", "jobs"),
        ("jobs stop nope", "jobs"),
        ("jobs restart nope", "jobs"),
        ("incidents --job nope", "jobs"),
        ("actions --job nope", "jobs"),
        ("incidents show nope", "incidents"),
        ("actions approve nope", "actions"),
    ):
        message = refusal(recorded, *words.split())
        assert message.startswith("Error: the server answered 404: There is no ")
        assert message.endswith(f"`paceline {lister}` lists all.")


def test_login_prints_a_link_that_works_once(recorded: Recorded) -> None:
    (link,) = lines(recorded, "login")
    assert link.startswith(f"{recorded.server.url}/login?code=")
    assert [httpx.get(link, timeout=60).status_code for _ in range(2)] == [303, 403]


def test_unknown_token_and_missing_token_get_different_errors(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STATE_DIRECTORY, str(tmp_path))  # like another user
    with recorded.server.program.database.write() as session:
        secret = create_token(session, "eve", "viewer", 1)
    assert refusal(recorded, "jobs").endswith("Give one with --token or PACELINE_TOKEN.")
    assert "does not know the one given" in refusal(recorded, "jobs", "--token", "wrong")
    assert lines(recorded, "jobs", "--token", secret)[0].startswith("JOB ")
    message = refusal(recorded, "jobs", "--token", secret, "stop", JOB)
    assert (
        "403: This request needs a token with scope operator; token 'eve' has scope viewer."
        in message
    )
