"""`paceline run` follows its job until it has ended; with a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from paceline_cli.main import main

VERDICT = {"text": "All ranks are even."}
RUNNING = {"id": "job-1", "state": "running", "step": 7, "loss": None, "verdict": VERDICT}
FINISHED = {**RUNNING, "state": "finished"}


class Handler(BaseHTTPRequestHandler):
    """Answers with a status and a body each, in order; no status closes the connection."""

    answers: list[tuple[int | None, Any]]
    keys: list[str | None]  # one per request for a new job

    def do_GET(self) -> None:
        status, body = self.answers.pop(0) if self.answers else (404, {"detail": "No answer left."})
        if status is None:
            self.close_connection = True
            return
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Idempotency-Key"])
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that first creates the job."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    Handler.answers, Handler.keys = [(201, RUNNING)], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def run(server: str) -> Any:
    return CliRunner().invoke(main, ["run", "--server", server, "--", "python", "train.py"])


def test_it_follows_the_job_through_a_restart_of_the_server(server: str) -> None:
    unavailable = {"detail": "The database is unavailable."}
    Handler.answers += [(200, RUNNING), (503, unavailable), (None, None), (200, FINISHED)]
    result = run(server)
    assert result.exit_code == 0, result.output
    assert "not known, trying again: the server answered 503: The database is" in result.output
    assert f"not known, trying again: no answer from {server}" in result.output
    assert result.output.splitlines()[-1].startswith("[finished]")


def test_a_job_whose_creation_is_not_answered_is_created_once(server: str) -> None:
    Handler.answers = [(None, None), (201, RUNNING), (200, FINISHED)]
    result = run(server)
    assert result.exit_code == 0, result.output
    [key, repeated] = Handler.keys
    assert key == repeated is not None
    Handler.answers = [(503, {"detail": "The database is unavailable."}), (201, RUNNING)]
    assert run(server).exit_code == 1
    assert len(Handler.keys) == 3, "an error is no lost answer"


def test_a_job_that_the_server_does_not_have_is_an_error(server: str) -> None:
    Handler.answers += [(404, {"detail": "There is no job 'job-1'."})]
    result = run(server)
    assert result.exit_code == 1
    assert "There is no job" in result.output


def test_a_job_that_nobody_follows_any_more_has_not_finished(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    Handler.answers += [(200, RUNNING)]
    monkeypatch.setattr(time, "sleep", interrupt)
    result = run(server)
    assert result.exit_code == 1
    assert "The job continues; end it with: paceline jobs stop job-1" in result.output
