"""The node's key: created once, kept on disk, sent with every request."""

from __future__ import annotations

import asyncio
import http.server
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_agent.forward.node_key import FILE_NAME, load_node_key
from paceline_agent.forward.server_link import ServerLink, Target
from paceline_wire.node_key import HEADER


def test_the_key_outlives_the_agent(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "spool"
    key = load_node_key(directory)
    assert key is not None
    assert len(key) == 43
    assert load_node_key(directory) == key
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == [FILE_NAME], "no temporary file is left"
    assert load_node_key(tmp_path / "another") != key


def test_agents_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    keys: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: keys.append(load_node_key(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.chmod(0o644), "other users can read it"),
        (lambda path: path.write_text("short"), "it holds no key"),
        (lambda path: path.write_bytes(b"\xff" * 43), "it holds no key"),
        (lambda path: os.truncate(path, 0), "it holds no key"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file of the agent's user"),
    ],
)
def test_a_key_that_cannot_be_trusted_is_kept_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    path = tmp_path / FILE_NAME
    load_node_key(tmp_path)
    assert callable(damage)
    damage(path)
    before = path.lstat()
    assert load_node_key(tmp_path) is None
    assert path.lstat().st_ino == before.st_ino
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert reason in record.getMessage()
    assert "paceline server node-key release" in record.getMessage()


def test_an_agent_on_a_disk_that_cannot_be_written_works_without_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert load_node_key(tmp_path / "file" / "spool") is None
    assert "Not a directory" in caplog.text


class _Recorder(http.server.BaseHTTPRequestHandler):
    keys: list[str | None]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.keys.append(self.headers.get(HEADER))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.keys.append(self.headers.get(HEADER))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def received() -> Iterator[tuple[str, list[str | None]]]:
    """Return the URL of a server and the keys that it receives."""
    keys: list[str | None] = []
    handler = type("Handler", (_Recorder,), {"keys": keys})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", keys
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("key", ["k" * 43, None])
def test_batches_and_the_stream_show_the_key(
    received: tuple[str, list[str | None]], key: str | None
) -> None:
    url, keys = received

    async def exchange() -> None:
        link = ServerLink(Target(url, node_key=key))
        await link.post("/api/v1/ingest", b"", "x")
        async for _ in link.lines("/api/v1/agents/node-0/commands", 5.0):
            break
        link.close()

    asyncio.run(exchange())
    assert keys == [key, key]
