"""The API client: pages, and errors that say what to do; with a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import click
import pytest
from click.testing import CliRunner

from paceline_cli.client import Client
from paceline_cli.main import main


class Handler(BaseHTTPRequestHandler):
    """Serves two pages of jobs, and errors."""

    hasty_has_failed: ClassVar = threading.Event()

    def do_GET(self) -> None:
        url = urlparse(self.path)
        cursor = parse_qs(url.query).get("cursor", [""])[0]
        if url.path == "/api/v1/jobs":
            page = {"items": [cursor or "first"], "next_cursor": None if cursor else "second"}
            self._answer(200, page)
        elif url.path == "/api/v1/nodes/a%20%231%3F":
            self._answer(200, {"path": self.path})
        elif url.path == "/api/v1/incidents/i":
            self._answer(200, {"id": "i", "as": self.headers.get("Authorization")})
        elif url.path == "/api/v1/locked":
            self._answer(401, {"detail": "a token is needed"})
        elif url.path in ("/api/v1/list", "/api/v1/word"):
            self._answer(200, [1, 2] if url.path.endswith("list") else {"hello": 1})
        elif url.path.startswith("/api/v1/jobs/early"):
            self._answer(200, {"items": []} if url.path.endswith("ranks") else {"id": "early"})
        elif url.path.startswith("/api/v1/actions"):
            self._answer(404, {"title": "Not Found", "detail": "Not Found"})
        elif url.path == "/api/v1/jobs/half/ranks":
            states = ("exited", "running")
            ranks = [{"rank": rank, "state": state} for rank, state in enumerate(states)]
            self._answer(200, {"items": ranks})
        elif url.path == "/api/v1/jobs/half/ranks/1/stacks":
            self._answer(200, {"rank": 1, "state": "failed", "error": "no py-spy", "stacks": None})
        elif url.path == "/api/v1/slow":
            self.hasty_has_failed.wait(60)
            time.sleep(0.5)
            self._answer(200, {"hello": 1})
        elif url.path == "/api/v1/page":
            self._send(200, b"<html>hello</html>", "text/html")
        else:
            self._send(500, b"<html>boom</html>", "text/html")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/v1/jobs/half/ranks/1/stacks":
            self._answer(202, {"state": "asked"})
        else:
            self._answer(409, {"detail": "there is no process to read"})

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with Client(f"http://127.0.0.1:{server.server_port}/") as made:
        yield made
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_list_is_read_page_after_page(client: Client) -> None:
    assert client.items("/jobs") == ["first", "second"]


def test_an_id_may_have_any_letters(client: Client) -> None:
    assert client.get("/nodes/a #1?") == {"path": "/api/v1/nodes/a%20%231%3F"}


def test_a_server_may_be_given_more_time(client: Client) -> None:
    with (
        Client(client.server, timeout_seconds=0.05) as hasty,
        pytest.raises(click.ClickException, match="timed out"),
    ):
        hasty.get("/slow")
    Handler.hasty_has_failed.set()
    with Client(client.server, timeout_seconds=60.0) as patient:
        assert patient.get("/slow") == {"hello": 1}


def test_a_missing_token_is_named_with_its_remedy(client: Client) -> None:
    with pytest.raises(click.ClickException, match=r"401: a token is needed Give one with --token"):
        client.get("/locked")


def test_a_response_of_another_server_is_reported(client: Client) -> None:
    for path in ("/elsewhere", "/page"):
        with pytest.raises(click.ClickException, match="text/html, not as `paceline server` does"):
            client.get(path)
        with pytest.raises(click.ClickException, match="text/html, not as `paceline server` does"):
            client.download(path)
    for path in ("/list", "/word"):
        with pytest.raises(
            click.ClickException, match="application/json, not as `paceline server`"
        ):
            client.items(path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jobs show early", "has no 'verdict'. It is another program, or another release"),
        ("jobs export early -o FILE", "not as `paceline server` does"),  # no header with the sizes
        ("analyze early", "has no 'slowdown'. It is another program, or another release"),
        ("actions show a", "has no /api/v1/actions/a. It is another program, or another release"),
        ("policy", "not as `paceline server` does"),
    ],
)
def test_a_response_of_another_release_is_one_sentence(
    client: Client, tmp_path: Path, words: str, expected: str
) -> None:
    arguments = words.replace("FILE", str(tmp_path / "trace.parquet")).split()
    result = CliRunner().invoke(main, [*arguments, "--server", client.server])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert expected in result.output


def test_stacks_are_those_of_the_ranks_that_run(client: Client) -> None:
    stacks = ["jobs", "stacks", "--server", client.server]
    assert CliRunner().invoke(main, [*stacks, "half"]).output == "Rank 1: no py-spy\n"
    none = CliRunner().invoke(main, [*stacks, "early"])
    assert none.exit_code == 1
    assert "no rank of early runs" in none.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--server", "node-1:8470"), "expected http://HOST:PORT, got 'node-1:8470'"),
        (("--server", "http://node..1"), "expected http://HOST:PORT, got 'http://node..1'"),
        (("--server", "http://node-1:http"), "expected http://HOST:PORT, got 'http://node-1:http'"),
        (("--server", "http://"), "expected http://HOST:PORT, got 'http://'"),
        (("--token", "gl\xfcck"), "expected what `paceline server token create` printed"),
    ],
)
def test_what_no_server_can_be_asked_with_is_refused(
    options: tuple[str, str], expected: str
) -> None:
    result = CliRunner().invoke(main, ["jobs", *options])
    assert result.exit_code == 2
    assert expected in result.output


@pytest.mark.parametrize(
    "words",
    [
        "incidents --server URL --token t --json show i",
        "incidents show i --json --server URL --token t",
        "incidents --server http://127.0.0.1:9 --token other show --token t --json --server URL i",
    ],
)
def test_options_stand_before_or_after_the_subcommand(client: Client, words: str) -> None:
    result = CliRunner().invoke(main, words.replace("URL", client.server).split())
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"id": "i", "as": "Bearer t"}


def test_no_server_says_how_to_start_one() -> None:
    with (
        Client("http://127.0.0.1:9") as nobody,
        pytest.raises(click.ClickException, match="Is `paceline server` running there"),
    ):
        nobody.get("/jobs")


def test_no_proxy_is_between_a_server_on_loopback_and_its_user(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Client(client.server) as behind_proxy:
        assert behind_proxy.get("/word") == {"hello": 1}
    with (
        Client("http://node-1.example:8470") as other,
        pytest.raises(click.ClickException, match="no answer"),
    ):
        other.get("/word")
