"""Tokens found without configuration: only by their user, and sent to no other server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_wire import local_token
from paceline_wire.local_token import (
    STATE_DIRECTORY,
    TokenFileError,
    find_token,
    read_token,
    state_directory,
    token_path,
)

TOKEN = "paceline_" + "x" * 43
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes users")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = token_path(tmp_path, "operator")
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    return {STATE_DIRECTORY: str(tmp_path)}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def url(listener: socket.socket, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{listener.getsockname()[1]}"


def test_a_token_is_found_for_a_server_of_this_user(
    environment: dict[str, str], listener: socket.socket
) -> None:
    assert find_token(url(listener), "operator", environment) == TOKEN
    assert find_token(url(listener, "localhost"), "operator", environment) == TOKEN
    assert find_token(url(listener), "agent", environment) is None


def test_the_table_of_sockets_is_only_read_for_a_token(
    environment: dict[str, str], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent without a token searches for one before each request."""
    tables: list[str] = []
    monkeypatch.setattr(local_token, "_listeners", lambda host, port: tables.append(host))
    assert find_token(url(listener), "agent", environment) is None
    assert not tables
    assert find_token(url(listener), "operator", environment) == TOKEN
    assert tables == ["127.0.0.1"]


def test_a_token_is_not_for_another_machine(environment: dict[str, str]) -> None:
    for other in ("http://10.0.0.1:8470", "https://paceline.example", "http://[2001:db8::1]"):
        assert find_token(other, "operator", environment) is None


@needs_root
@pytest.mark.parametrize(
    "address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0"]
)
def test_a_token_is_not_for_another_users_server(
    environment: dict[str, str], tmp_path: Path, address: str
) -> None:
    program = (
        "import os, socket, sys; os.setuid(65534);"
        f"family = socket.AF_INET6 if ':' in {address!r} else socket.AF_INET;"
        f"s = socket.socket(family); s.bind(({address!r}, 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as thief:
        assert thief.stdout is not None
        port = int(thief.stdout.readline())
        host = "[::1]" if address == "::1" else "127.0.0.1"
        assert find_token(f"http://{host}:{port}", "operator", environment) is None
        thief.terminate()


def test_a_token_is_not_for_whoever_listens_next(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = url(closed)
    assert find_token(address, "operator", environment) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused(environment: dict[str, str], mode: int) -> None:
    path = token_path(state_directory(environment), "operator")
    path.chmod(mode)
    with pytest.raises(TokenFileError, match="nobody else can read"):
        read_token(path)


@needs_root
def test_a_file_of_another_user_is_refused(environment: dict[str, str]) -> None:
    path = token_path(state_directory(environment), "operator")
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(TokenFileError, match="must be a file of this user"):
        read_token(path)


def test_a_link_a_pipe_and_other_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").touch(0o600)
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("target", "link", "pipe"):
        with pytest.raises(TokenFileError, match=name):
            read_token(tmp_path / name)


def test_the_directory_is_named_or_the_users_own() -> None:
    assert state_directory({STATE_DIRECTORY: "/x"}) == Path("/x")
    assert state_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/paceline")
    assert state_directory({}) == Path.home() / ".local/state/paceline"


def test_a_user_without_a_home_directory_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with any user id."""
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(OSError, match="no home directory: name a directory with PACELINE_STATE"):
        state_directory({})
    assert find_token("http://127.0.0.1:9", "operator", {}) is None
