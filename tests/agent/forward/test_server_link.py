"""Connections to a server: it may close each one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline_agent.forward import server_link
from paceline_agent.forward.server_link import ServerLink, Target


class ClosingServer(ThreadingHTTPServer):
    """Closes each connection, and answers later than a connection may take."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.answers_after_seconds = 0.0


class Handler(BaseHTTPRequestHandler):
    server: ClosingServer

    def do_POST(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        threading.Event().wait(self.server.answers_after_seconds)
        try:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:  # the client has given up
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def closing() -> Iterator[ClosingServer]:
    started = ClosingServer()
    thread = threading.Thread(target=started.serve_forever, args=(0.01,))
    thread.start()
    yield started
    started.shutdown()
    started.server_close()
    thread.join()


def test_a_slow_answer_on_a_new_connection_is_waited_for_and_the_batch_sent_once(
    closing: ClosingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "CONNECT_SECONDS", 0.2)

    async def post_twice() -> None:
        link = ServerLink(Target(f"http://127.0.0.1:{closing.server_port}"))
        for seconds in (0.0, 0.5):
            closing.answers_after_seconds = seconds
            assert (await link.post("/ingest", b"batch", "text/plain")).status == 200
        link.close()

    asyncio.run(post_twice())
    assert closing.requests == 2
