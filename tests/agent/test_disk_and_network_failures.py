"""A real agent with failing disks, servers and proxies: each is one log line, and it continues."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import HTMLResponse, RedirectResponse, Response

from paceline_agent.errors import LinkError
from paceline_agent.forward import server_link
from paceline_agent.forward.server_link import ServerLink, Target
from paceline_wire.batch import AgentHello, Batch, RankAttached
from tests.ports import free_port

Fixture = Callable[..., Any]


class Metrics:
    """An agent started with `options`, and the metrics about itself."""

    def __init__(self) -> None:
        self._port = free_port()
        self.options = ("--metrics", "--metrics-port", str(self._port))

    def __getitem__(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            text = answer.read().decode()
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"paceline_agent_{name}"
        ]
        (value,) = found
        return value


@pytest.mark.campaign
def test_a_full_disk_costs_only_the_oldest_detail_is_counted_and_recovers(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    small_disk: Callable[[str], Path],
    make_rank: Fixture,
    spans_of: Fixture,
) -> None:
    disk, metrics = small_disk("1m"), Metrics()
    agent = start_agent(
        "--spool-directory", str(disk / "spool"), "--spool-bytes", "300000", *metrics.options
    )
    wait_for(lambda: server.batches)
    server.stop()
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
    rank = make_rank(agent.directory)

    def has_lost() -> bool:
        rank.write(8000)
        return metrics["spool_lost_spans_total"] > 0

    wait_for(has_lost, seconds=60)
    assert metrics["spool_writable"] == 0
    assert metrics["spool_bytes"] <= 300_000
    (disk / "filler").unlink()
    wait_for(lambda: rank.write(1) or metrics["spool_writable"] == 1)
    server.start()
    wait_for(lambda: metrics["spool_batches"] <= 1 and rank.written - 1 in spans_of(server))
    dropped = metrics["spool_lost_spans_total"]
    agent.stop()
    found = spans_of(server)
    overrun = sum(block.lost for batch in server.batches for block in batch.spans)
    assert found == sorted(set(found))
    assert found[-1] == rank.written - 1, "the newest stay"
    assert len(found) + overrun + dropped == rank.written, "what is lost is counted"
    assert server.batches[-1].dropped_batches > 0, "and shown"
    assert len(server.events(RankAttached)) == 1, "facts stay"
    assert agent.log_text().count("cannot be written (No space left on device)") == 1
    assert agent.log_text().count("can be written again") == 1
    assert "Traceback" not in agent.log_text()


PROBLEM = "application/problem+json"
PAGE = "<html>\n<body>\x1b[2J nginx</body></html>"
ANSWERS: list[tuple[Callable[[], Response], str]] = [
    (lambda: Response(status_code=500), "500 with no content, probably from a proxy in front"),
    (lambda: HTMLResponse(PAGE, 502), "502 with text/html; charset=utf-8, probably from a proxy"),
    (lambda: HTMLResponse(PAGE, 400), "400 with text/html; charset=utf-8, probably from a proxy"),
    (lambda: HTMLResponse(PAGE, 407), "407 with text/html; charset=utf-8, probably from a proxy"),
    (lambda: HTMLResponse(PAGE, 200), "the server's answer is not an ingest answer"),
    (lambda: RedirectResponse("http://127.0.0.1:9/"), "307 with no content, probably from a proxy"),
    (
        lambda: Response(
            '{"title": "Too many", "detail": "Come back later."}',
            429,
            {"Retry-After": "0.2"},
            media_type=PROBLEM,
        ),
        "429 Come back later.",
    ),
    (
        lambda: Response("{}", 503, {"Retry-After": "nan"}, media_type=PROBLEM),
        "503",
    ),
]


def test_no_answer_loses_a_batch_and_each_kind_is_logged_once(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    attempts: list[tuple[str, int]] = []

    def refuse(batch: Batch) -> Response | None:
        attempts.append((batch.boot_id, batch.sequence))
        number = len(attempts) - 1
        return ANSWERS[number][0]() if number < len(ANSWERS) else None

    server.refuse = refuse
    metrics = Metrics()
    agent = start_agent(*metrics.options)
    wait_for(lambda: len(server.batches) >= 3, seconds=60)
    assert metrics["send_retries_total"] == len(ANSWERS)
    assert metrics["batches_rejected_total"] == 0
    agent.stop()
    assert len(set(attempts[: len(ANSWERS)])) == 1, "nothing overtakes what is being sent"
    log = agent.log_text()
    lines = [line for line in log.splitlines() if "cannot send to the server" in line]
    assert len(lines) == len(ANSWERS)
    for (_, message), line in zip(ANSWERS, lines, strict=True):
        assert message in line
    assert log.count("sending to the server again") == 1
    assert "\x1b" not in log
    assert "Traceback" not in log


@pytest.mark.campaign
def test_a_batch_too_large_for_a_proxy_is_set_aside_and_the_others_are_sent(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    server.refuse = lambda batch: HTMLResponse(PAGE, 413) if batch.sequence == 1 else None
    metrics = Metrics()
    agent = start_agent(*metrics.options)
    wait_for(lambda: len(server.batches) >= 2)
    assert metrics["batches_rejected_total"] == 1
    agent.stop()
    assert [batch.sequence for batch in server.batches][:2] == [0, 2]
    assert "413 with text/html; charset=utf-8, probably from a proxy in front" in agent.log_text()


@contextmanager
def answering(port: int, pieces: Callable[[], Iterator[bytes]]) -> Iterator[None]:
    """A server that responds to any request with these bytes."""
    listener = socket.create_server(("127.0.0.1", port))
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                for piece in pieces():
                    if ended.is_set():
                        return
                    connection.sendall(piece)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.campaign
def test_an_answer_that_is_not_http_becomes_a_printable_sentence(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    server.stop()
    with answering(server.port, lambda: iter([b"\x15\x03\x01\x00\x02\x02\x16\x1b[2J\r\n\r\n"])):
        agent = start_agent()
        wait_for(lambda: "cannot send to the server" in agent.log_text())
    server.start()
    wait_for(lambda: server.batches)
    agent.stop()
    assert server.batches[0].sequence == 0
    assert "BadStatusLine" in agent.log_text()
    assert "\x1b" not in agent.log_text()
    assert "Traceback" not in agent.log_text()


def test_an_answer_that_arrives_too_slowly_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response arrives byte by byte, so that no single wait is too long."""
    monkeypatch.setattr(server_link, "EXCHANGE_SECONDS", 0.5)
    monkeypatch.setattr(server_link, "CONNECT_SECONDS", 0.25)

    def trickle() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX: "
        while True:
            yield b"x"
            time.sleep(0.05)

    async def ask(url: str) -> None:
        link = ServerLink(Target(url))
        for _ in range(2):
            with pytest.raises(LinkError, match=r"no complete answer within 0\.5 s"):
                await link.post("/api/v1/ingest", b"x", "y")
        with pytest.raises(LinkError, match="no complete line within"):
            async for _ in link.lines("/api/v1/agents/a/commands", 3.0):
                pass
        link.close()

    port = free_port()
    with answering(port, trickle):
        asyncio.run(ask(f"http://127.0.0.1:{port}"))


@pytest.mark.campaign
def test_an_unknown_host_is_one_sentence_and_the_agent_continues(
    start_agent: Fixture, wait_for: Fixture
) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("A MISSING NAME SERVER IS NOT TESTED: a network namespace needs root")
    agent = start_agent(
        "--allow-plain-http", url="http://server.example:8470", under=["unshare", "--net"]
    )
    wait_for(lambda: len(list((agent.directory / "spool").glob("*.batch"))) >= 3)
    assert agent.stop() == 0
    lines = [line for line in agent.log_text().splitlines() if "cannot send" in line]
    assert len(lines) == 1
    assert "name resolution" in lines[0] or "not known" in lines[0]
    assert "Traceback" not in agent.log_text()


@pytest.mark.campaign
@pytest.mark.parametrize("trouble", ["Read-only file system", "Permission denied"])
def test_an_unusable_spool_is_one_sentence_and_the_agent_continues(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    small_disk: Callable[[str], Path],
    trouble: str,
) -> None:
    disk = small_disk("1m")
    under: list[str] = []
    spool = disk / "spool"
    spool.mkdir(mode=0o755)
    if trouble == "Read-only file system":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        under = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
        spool.chmod(0o555)
    agent = start_agent("--spool-directory", str(spool), under=under)
    wait_for(lambda: len(server.batches) >= 3)
    assert agent.stop() == 0
    assert agent.log_text().count(f"cannot be written ({trouble})") == 1
    assert len(server.events(AgentHello)) == 1
    assert "Traceback" not in agent.log_text()
