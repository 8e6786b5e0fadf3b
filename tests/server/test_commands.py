"""The server's commands, run as processes and through click."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from sqlalchemy import text

from paceline_server.__main__ import main
from paceline_server.app import StartError, listen
from paceline_server.settings import Settings
from paceline_server.store.database import Database, UnusableError
from paceline_wire.address import is_loopback

EXPORTED = Path(__file__).parents[2] / "web" / "openapi.json"


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """One kind of database is enough here."""
    return f"sqlite:///{tmp_path}/test.db"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_exported_openapi_is_current() -> None:
    printed = run("openapi")
    assert printed.exit_code == 0
    assert printed.output == EXPORTED.read_text(), (
        "run: python -m paceline_server openapi > web/openapi.json"
    )


def test_openapi_is_complete_enough_to_generate_clients() -> None:
    document = json.loads(EXPORTED.read_text())
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    identifiers = [operation["operationId"] for operation in operations]
    assert len(identifiers) == len(set(identifiers))
    known = set(document["components"]["schemas"])
    references = {part.split('"')[0] for part in json.dumps(document).split("/schemas/")[1:]}
    assert references <= known, references - known


def test_server_starts_becomes_ready_and_stops(
    run_process: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    process = run_process("--port", "0")
    url = process.url()
    ready = f"{url}/readyz"
    wait_for(lambda: httpx.get(ready, timeout=60.0).is_success, "the worker")
    assert httpx.get(ready, timeout=60.0).json() == {"ready": True, "missing": []}
    process.signal(signal.SIGTERM)
    process.process.wait(60)
    hint = f"Sign in a browser with: paceline login --server {url}"
    assert process.log.read_text().splitlines() == [f"Listening on {url}", hint]


def test_server_without_tokens_listens_on_loopback_only(
    run_process: Callable[..., Any], database_url: str, wait_for: Callable[..., Any]
) -> None:
    refused = run_process("--host", "0.0.0.0", "--port", "0")
    assert refused.process.wait(60) == 2
    (line,) = refused.log.read_text().splitlines()
    assert "paceline server token create" in line
    create = ["server", "--database-url", database_url, "token", "create", "--name", "me"]
    secret = run(*create, "--scope", "operator").output.strip()
    assert secret.startswith("paceline_")
    assert "choose another name" in run(*create, "--scope", "agent").output
    started = run_process("--host", "0.0.0.0", "--port", "0")
    url = started.url().replace("0.0.0.0", "127.0.0.1")
    assert httpx.get(f"{url}/api/v1/jobs", timeout=60).status_code == 401
    bearer = {"Authorization": f"Bearer {secret}"}
    assert httpx.get(f"{url}/api/v1/jobs", headers=bearer, timeout=60).status_code == 200


def test_database_that_a_command_has_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --database-url it is in the current directory, which may not be the server's."""
    monkeypatch.chdir(tmp_path)
    create = ["server", "token", "create", "--scope", "viewer", "--name"]
    first, second = run(*create, "me"), run(*create, "you")
    assert f"created the database {tmp_path / 'paceline.db'}. " in first.stderr
    assert first.stdout.startswith("paceline_")
    assert second.stderr == ""


def test_port_in_use_is_reported_in_one_sentence(run_process: Callable[..., Any]) -> None:
    port = run_process("--port", "0").url().rpartition(":")[2]
    second = run_process("--port", port)
    assert second.process.wait(60) == 2
    assert "choose another --port" in second.log.read_text()


def test_only_a_socket_that_listens_on_loopback_is_inherited(tmp_path: Path) -> None:
    with (
        (tmp_path / "file").open("w") as file,
        socket.socket() as silent,
        socket.create_server(("0.0.0.0", 0)) as public,
        socket.create_server(("127.0.0.1", 0)) as local,
    ):
        with pytest.raises(StartError, match="is no socket"):
            listen(Settings(fd=file.fileno()))
        for refused in (silent, public):
            with pytest.raises(StartError, match="does not listen on a loopback address"):
                listen(Settings(fd=os.dup(refused.fileno())))
        with listen(Settings(fd=os.dup(local.fileno()))) as inherited:
            assert inherited.getsockname() == local.getsockname()
            assert inherited.proto == socket.IPPROTO_TCP, "asyncio then sends without delay"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--database-url", "mysql://x"), "expected sqlite:///PATH or postgresql://"),
        (("--database-url", "postgresql://me@host:port/x"), "got postgresql:..."),
        (("--database-url", "sqlite:///:memory:"), "expected sqlite:///PATH"),
        (("--port", "70000"), "--port: Input should be less than or equal to 65535"),
        (("--webhook-url", "hooks.example/x/y"), "or https://HOST/..., got hooks.example..."),
        (("--alertmanager-url", "ftp://alerts"), "got ftp:..."),
        (("--action-webhook-url", "http://a..b/secret"), "got http:..."),
        (("--alertmanager-url", "http://localhost:9093"), "--allow-local-receivers"),
        (("--webhook-url", "http://[::1]/x"), "--webhook-url: expected no loopback or link-local"),
        (("--chat-webhook-url", "http://169.254.169.254/x"), "got 169.254.169.254; allow that"),
        (("--external-url", "http://host:port"), "got http:..."),
    ],
)
def test_invalid_settings_are_reported_in_one_sentence(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run("server", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TICK_SECONDS", "fast", "Input should be a valid number"),
        ("CHAT_WEBHOOK_URL", "hooks.example/x", "expected http://HOST/... or https://HOST/..."),
        ("ACTION_WEBHOOK_URL", "http://127.0.0.1/x", "expected no loopback or link-local address"),
    ],
)
def test_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"PACELINE_SERVER_{name}", value)
    result = run("server", "migrate")
    assert result.exit_code == 2
    assert result.output.startswith(f"paceline server: PACELINE_SERVER_{name}: {message}")


def test_variable_of_a_repeated_option_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    monkeypatch.setattr("paceline_server.app.serve", found.append)
    for name in ("HOST", "HOSTS"):
        monkeypatch.setenv(f"PACELINE_SERVER_ALLOWED_{name}", "a.example, b.example")
        assert run("server").exit_code == 0
        monkeypatch.delenv(f"PACELINE_SERVER_ALLOWED_{name}")
    assert [each.allowed_hosts for each in found] == [("a.example", "b.example")] * 2


def test_database_may_be_named_after_the_subcommand(tmp_path: Path) -> None:
    before, after = ("--database-url", f"sqlite:///{tmp_path}/one.db"), ("--name", "me")
    assert run("server", *before, "token", "create", *after, "--scope", "viewer").exit_code == 0
    for words in (("token", "revoke", *after), ("migrate",)):
        assert run("server", *words, *before).exit_code == 0
    wrong = run("server", "node-key", "release", "node-1", "--database-url", "mysql://x")
    assert wrong.output.startswith("paceline server: --database-url: expected sqlite:///PATH")
    assert [path.name for path in tmp_path.glob("*.db")] == ["one.db"]


def test_user_without_a_home_directory_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with any user id."""
    monkeypatch.delenv("PACELINE_STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    result = run("server", "migrate")
    assert result.exit_code == 2
    assert "has no home directory: name a directory with PACELINE_STATE_DIRECTORY" in result.output


def test_file_that_is_not_a_database_is_reported_in_one_sentence(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Garbage collection of the process that runs the tests stays as it is.
    monkeypatch.setattr("paceline_server.app.tune_interpreter", lambda: None)
    path = Path(database_url.removeprefix("sqlite:///"))
    path.write_text("step,loss\n" * 100)
    for command in (["migrate"], []):
        result = run("server", "--database-url", database_url, *command)
        assert result.exit_code == 2
        assert result.output.startswith("paceline server: The database cannot be opened: file is")
        assert str(path) in result.output


def test_database_of_a_later_version_is_reported_in_one_sentence(database: Database) -> None:
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UnusableError, match="later version of Paceline"):
        database.migrate()


def test_settings_read_the_environment_and_prefer_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SERVER_PORT", "1234")
    assert Settings().port == 1234
    assert Settings(port=1).port == 1, "the command line wins"
    with pytest.raises(ValidationError):
        Settings().port = 5  # type: ignore[misc]


def test_variable_of_a_kubernetes_service_is_not_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod gets one for a Service `paceline-server`, as deploy/kubernetes names it."""
    monkeypatch.setenv("PACELINE_SERVER_PORT", "tcp://10.96.0.7:80")
    assert Settings().port == 8470
    assert Settings(port=1).port == 1


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer
