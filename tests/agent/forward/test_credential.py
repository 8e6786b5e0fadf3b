"""The token that an agent sends: the configured one, otherwise that of its user for a local
server."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from pathlib import Path

import pytest

from paceline_agent.forward.credential import Credential
from paceline_wire.local_token import STATE_DIRECTORY, token_path

TOKEN = "paceline_" + "x" * 43


def write_token(directory: Path, mode: int = 0o600) -> None:
    path = token_path(directory, "agent")
    path.touch(mode)
    path.chmod(mode)
    path.write_text(TOKEN)


def test_the_token_of_a_server_that_starts_later_is_found(tmp_path: Path) -> None:
    environment = {STATE_DIRECTORY: str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        credential, connection = Credential(url, None, environment), HTTPConnection("127.0.0.1")
        assert credential(connection) is None
        write_token(tmp_path)
        assert credential(connection) == TOKEN
    assert credential(connection) == TOKEN, "known for this connection"
    assert credential(HTTPConnection("127.0.0.1")) is None, "another server may listen now"


def test_a_configured_token_takes_precedence(tmp_path: Path) -> None:
    write_token(tmp_path)
    credential = Credential("http://127.0.0.1:1", "own", {STATE_DIRECTORY: str(tmp_path)})
    assert credential(HTTPConnection("127.0.0.1")) == "own"


def test_an_unsafe_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_token(tmp_path, 0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        credential = Credential(url, None, {STATE_DIRECTORY: str(tmp_path)})
        for _ in range(2):
            assert credential(HTTPConnection("127.0.0.1")) is None
    (record,) = caplog.records
    assert "nobody else can read" in record.getMessage()
