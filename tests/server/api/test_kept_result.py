"""The result of a training, which `paceline watch` keeps and shows without a server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded_job import Recorded
from simulated_finding import SUMMARY, open_incident
from simulated_job import JOB

from paceline_cli import watched
from paceline_cli.main import main
from paceline_cli.watch_directory import RESULT, watch_directory
from paceline_server.store import models
from paceline_wire.local_token import STATE_DIRECTORY
from tests.ports import free_port

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIRECTORY, str(tmp_path))
    directory = watch_directory({STATE_DIRECTORY: str(tmp_path)})
    directory.mkdir(parents=True)
    return directory


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["watch", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_a_result_it_says_how_to_get_one(logs: Path) -> None:
    assert "paceline watch -- torchrun train.py" in shown()
    assert json.loads(shown("--json")) == {"jobs": []}
    refused = CliRunner().invoke(main, ["watch", "--json", "true"])
    assert "--json is for" in refused.stderr


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_result_is_that_of_the_server_and_stays(recorded: Recorded, logs: Path) -> None:
    url = recorded.server.url
    with recorded.server.program.database.write() as session:
        session.get_one(models.JobRow, JOB).step = 7
        session.add(open_incident("act-1"))
    watched.write(logs, url, datetime.now(UTC))
    first, verdict, *_ = shown().splitlines()
    assert first.startswith("As of ")
    assert verdict == SUMMARY
    assert shown().splitlines()[-1].split() == [url, "dashboard"]
    with recorded.server.program.database.write() as session:
        job = session.get_one(models.JobRow, JOB)
        job.state, job.finished_ns = "finished", 1_700_000_000_000_000_000
    watched.write(logs, url, LONG_AGO)
    for _ in range(2):
        kept = json.loads(shown("--json"))
        assert [(job["id"], job["state"]) for job in kept["jobs"]] == [(JOB, "finished")]
        assert [each["lines"] for each in kept["problems"]] in ([[SUMMARY]], [])
        assert shown().startswith("Finished at step 7.")
        assert f"paceline server --database-url sqlite:///{logs}" in shown()
        watched.write(logs, f"http://127.0.0.1:{free_port()}", LONG_AGO)  # no server
        watched.write(logs, url, datetime.now(UTC))  # the job is of an earlier training


@pytest.mark.parametrize(
    ("kind", "severity", "state", "lines"),
    [
        ("healthy", "warning", "open", ["It is slow."]),
        ("healthy", "warning", "resolved", []),
        ("host_noise", "info", "open", []),
        ("standstill", "info", "open", ["No progress for 26 s."]),
    ],
)
def test_the_last_lines_are_the_problems_of_the_moment(
    kind: str, severity: str, state: str, lines: list[str]
) -> None:
    incident = {"severity": severity, "state": state, "summary": "It is slow."}
    verdict = {"kind": kind, "text": "No progress for 26 s."}
    assert watched.problems({"verdict": verdict, "incidents": [incident]}) == lines


def test_a_result_of_another_release_is_reported(logs: Path) -> None:
    (logs / RESULT).write_text(json.dumps({"jobs": [{"state": "finished"}]}))
    assert "of another release" in CliRunner().invoke(main, ["watch"]).stderr


def test_a_command_without_its_server_names_the_result(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("paceline_cli.client.DEFAULT_SERVER_URL", address)

    def error() -> str:
        return CliRunner().invoke(main, ["jobs", "--server", address]).stderr

    assert "paceline watch" not in error()
    (logs / RESULT).write_text("{}")
    assert "`paceline watch` shows the last training" in error()
