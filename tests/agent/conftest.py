"""A real HTTP server that stores batches and sends commands, and real agents as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline_agent.collect.contract import Collector, Context
from paceline_wire import node_directory, ring
from paceline_wire.batch import Batch, CommandResult, Event, decode
from paceline_wire.commands import Command, Ping, encode_line
from paceline_wire.ring import Identity
from paceline_wire.spans import NONE_16, NONE_32, RECORD, RECORD_BYTES, Op, from_columns, unpack
from paceline_wire.topology import Coordinates, Topology
from tests.ports import free_port


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, what: str = "") -> Any:
    """Poll until `condition` returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.02)


class StubServer:
    """A server that keeps what agents send in memory; it can be stopped and started."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.duplicates = 0
        self.refuse: Callable[[Batch], Response | None] = lambda _: None
        self.commands: list[Command] = []
        self.raw_lines: list[bytes] = []  # sent first on each stream
        self.silent = False  # streams send nothing, not even a ping
        self.streams_opened = 0
        self.tokens: set[str] = set()
        self._seen: set[tuple[str, str, int]] = set()
        self.port = free_port()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self, kind: type[Any] | None = None) -> list[Any]:
        events: list[Event] = [event for batch in list(self.batches) for event in batch.events]
        return [event for event in events if kind is None or isinstance(event, kind)]

    def start(self) -> None:
        app = Starlette(
            routes=[
                Route("/api/v1/ingest", self._ingest, methods=["POST"]),
                Route("/api/v1/agents/{agent_id}/commands", self._stream),
            ]
        )
        config = uvicorn.Config(
            app, "127.0.0.1", self.port, lifespan="off", ws="none", log_level="error"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_for(lambda: self._server and self._server.started)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join()
        self._server = None

    async def _ingest(self, request: Request) -> Response:
        self.tokens.add(request.headers.get("authorization", ""))
        batch = decode(await request.body())
        refusal = await run_in_threadpool(self.refuse, batch)
        if refusal is not None:
            return refusal
        name = (batch.agent_id, batch.boot_id, batch.sequence)
        is_duplicate = name in self._seen
        if is_duplicate:
            self.duplicates += 1
        else:
            self._seen.add(name)
            self.batches.append(batch)
        status = "duplicate" if is_duplicate else "stored"
        return JSONResponse({"status": status, "sequence": batch.sequence})

    async def _stream(self, request: Request) -> Response:
        self.streams_opened += 1
        return StreamingResponse(self._lines(), media_type="application/x-ndjson")

    async def _lines(self) -> AsyncIterator[bytes]:
        sent = 0
        pinged = 0.0
        for line in self.raw_lines:
            yield line
        while self._server is not None and not self._server.should_exit:
            if not self.silent:
                if time.monotonic() - pinged > 1.0:
                    pinged = time.monotonic()
                    yield encode_line(Ping(time.time_ns()))
                for command in self.commands[sent:]:
                    yield encode_line(command)
                    sent += 1
            await run_in_threadpool(time.sleep, 0.02)


@pytest.fixture(autouse=True)
def _close_collectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of the collectors that a test has created."""
    created: list[Collector] = []
    initialize = Collector.__init__

    def remember(collector: Collector, context: Context) -> None:
        initialize(collector, context)
        created.append(collector)

    monkeypatch.setattr(Collector, "__init__", remember)
    yield
    for collector in created:
        with contextlib.suppress(AttributeError):  # one that was unavailable has opened nothing
            collector.close()


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(name="is_alive")
def _is_alive() -> Callable[[int], bool]:
    return is_alive


@pytest.fixture(name="processes_with")
def _processes_with() -> Callable[[str], list[int]]:
    return processes_with


@pytest.fixture
def server() -> Iterator[StubServer]:
    stub = StubServer()
    stub.start()
    yield stub
    stub.stop()


class AgentProcess:
    """An agent process: `python -m paceline_agent` with everything in a directory of the test."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *options: str,
        environment: Mapping[str, str],
        under: Sequence[str],
    ) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        command = [*under, sys.executable, "-m", "paceline_agent", "--server", url]
        command += ["--agent-id", directory.name, "--node-directory", str(directory)]
        if os.geteuid() == 0:  # the test's files belong to root
            command += ["--run-as", "root"]
        command += ["--no-metrics", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def log_text(self) -> str:
        return self.log.read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs of a given size ("1m")."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if (
            os.geteuid() != 0
            or subprocess.run(command, check=False, capture_output=True).returncode
        ):
            pytest.skip("A FULL DISK IS NOT TESTED: mounting a small tmpfs needs root")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that all users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir=node_directory.MEMORY) as scratch:
        Path(scratch).chmod(0o755)
        yield Path(scratch)


@pytest.fixture
def start_agent(server: StubServer, tmp_path: Path, open_directory: Path) -> Iterator[StartAgent]:
    """Start agents, which are stopped before their directories are removed."""
    agents: list[AgentProcess] = []

    def start(
        *options: str,
        name: str = "node-0",
        url: str | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        under: Sequence[str] = (),
    ) -> AgentProcess:
        """Start an agent. `under`: a command that runs it."""
        target = server.url if url is None else url
        agents.append(
            AgentProcess(target, tmp_path / name, *options, environment=environment, under=under)
        )
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()


@pytest.fixture
def order(server: StubServer) -> Callable[[Any], CommandResult]:
    """Send a command and wait for its result."""

    def give(command: Any) -> CommandResult:
        server.commands.append(command)

        def answers() -> list[CommandResult]:
            results = server.events(CommandResult)
            return [result for result in results if result.command_id == command.command_id]

        return wait_for(answers, what=f"the result of {command}")[0]  # type: ignore[no-any-return]

    return give


class RankRing:
    """The ring of an external rank in the agent's directory, with spans 0, 1, 2, ..."""

    def __init__(self, directory: Path, rank: int = 0, pid: int | None = None) -> None:
        identity = Identity(
            job="j",
            generation=0,
            rank=rank,
            local_rank=rank,
            world_size=8,
            topology=Topology(dp=8),
            coordinates=Coordinates(dp_rank=rank),
            pid=os.getpid() if pid is None else pid,
            host="here",
            clock_offset_ns=0,
            started_ns=time.monotonic_ns(),
        )
        self.written = 0
        self._file = ring.create(directory / "rings" / f"j.g0.r{rank}.ring", identity)

    def write(self, spans: int) -> None:
        """Write spans that start now and last 10 ns. More than the capacity cause an overrun."""
        capacity = self._file.capacity
        for index in range(self.written, self.written + spans):
            place = (index & (capacity - 1)) * RECORD_BYTES
            start_ns = time.monotonic_ns()
            self._file.spans[place : place + RECORD_BYTES] = RECORD.pack(
                index, Op.FORWARD, 0, NONE_16, 0, 5, NONE_32, NONE_32, 0, 0, 0, start_ns, 10
            )
            self.written = self._file.state[ring.STATE_HEAD] = index + 1

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def make_rank() -> Iterator[Callable[..., RankRing]]:
    rings: list[RankRing] = []

    def make(directory: Path, rank: int = 0, pid: int | None = None) -> RankRing:
        rings.append(RankRing(directory, rank, pid))
        return rings[-1]

    yield make
    for rank_ring in rings:
        rank_ring.close()


@pytest.fixture
def spans_of() -> Callable[..., list[int]]:
    """The indices of a rank's spans in the order in which a server received them."""

    def spans_of(server: StubServer, rank: int = 0) -> list[int]:
        return [
            span.index
            for batch in list(server.batches)
            for block in batch.spans
            if block.rank == rank
            for span in unpack(from_columns(block.columns))
        ]

    return spans_of


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def processes_with(text: str) -> list[int]:
    """Return the live processes that were started with `text` in their environment."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if text.encode() in environment and is_alive(int(name)):
                pids.append(int(name))
    return pids
