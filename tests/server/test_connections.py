"""Clients that never finish their requests do not block other clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from simulated_node import post_job

from paceline_server.connections import ConnectionLimits
from paceline_server.settings import Settings
from tests.server.conftest import RunningServer

HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Start = Callable[[ConnectionLimits], RunningServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def run(limits: ConnectionLimits) -> RunningServer:
            settings = Settings(database_url=f"sqlite:///{tmp_path}/test.db", port=0, role="api")
            server = RunningServer(settings, limits)
            server.start()
            stack.callback(server.stop)
            return server

        yield run


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """Open a connection and send bytes; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(server: RunningServer, content: bytes = b"") -> socket.socket:
            address = ("127.0.0.1", server.client.base_url.port or 0)
            connection = stack.enter_context(socket.create_connection(address, timeout=60.0))
            connection.sendall(content)
            return connection

        yield opened


def everything(connection: socket.socket) -> bytes:
    """Return the bytes that arrive until the server closes the connection."""
    with connection.makefile("rb") as file:
        return file.read()


def is_answered(connection: socket.socket) -> bool:
    """Read one whole response, which may arrive in parts; return whether its status is 200."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status == 200


def test_1200_half_sent_requests_of_one_address_do_not_block_it(
    start: Start, connect: Callable[..., socket.socket]
) -> None:
    limits = ConnectionLimits()
    server = start(limits)
    with httpx.stream("GET", f"{server.url}/api/v1/events", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        slow = [connect(server, HALF) for _ in range(1200)]
        for _ in range(3):
            assert httpx.get(f"{server.url}/healthz", timeout=60.0).status_code == 200
        assert everything(slow[0]).startswith(b"HTTP/1.1 408 ")
        job_id = post_job(server.url)
        assert any(job_id in line for line in lines), "open streams go on"
    assert len(server.connections) <= limits.incomplete_per_peer + 1


@pytest.mark.parametrize(
    "content",
    [
        HALF,
        WHOLE + HALF,
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_is_not_complete_in_time_gets_408(
    start: Start, connect: Callable[..., socket.socket], content: bytes
) -> None:
    server = start(ConnectionLimits(request_seconds=0.3))
    assert b"HTTP/1.1 408 " in everything(connect(server, content))


def test_a_connection_without_a_request_is_closed(
    start: Start, connect: Callable[..., socket.socket]
) -> None:
    server = start(ConnectionLimits(request_seconds=0.3))
    everything(connect(server))


def test_endless_headers_get_431(start: Start, connect: Callable[..., socket.socket]) -> None:
    connection = connect(start(ConnectionLimits()), HALF)
    with contextlib.suppress(OSError):
        connection.sendall(b"x" * (1 << 20))
    assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")


def test_beyond_the_total_the_longest_idle_connection_is_closed(
    start: Start, connect: Callable[..., socket.socket]
) -> None:
    server = start(ConnectionLimits(total=20))
    idle = []
    for _ in range(60):
        idle.append(connect(server, WHOLE))
        assert is_answered(idle[-1])
    assert len(server.connections) <= 20
    everything(idle[0])
    idle[-1].sendall(WHOLE)
    assert is_answered(idle[-1])


def test_a_batch_that_breaks_off_is_no_error_of_the_server(
    start: Start, connect: Callable[..., socket.socket], caplog: Any
) -> None:
    limits = ConnectionLimits(request_seconds=0.3)
    server = start(limits)
    token = server.agent_token
    head = (
        "POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n"
        f"Content-Type: application/x-paceline-batch\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    assert everything(connect(server, head.encode() + b"half")).startswith(b"HTTP/1.1 408 ")
    limits.request_seconds = 60.0
    assert httpx.get(f"{server.url}/healthz", timeout=60).status_code == 200
    assert caplog.records == []
