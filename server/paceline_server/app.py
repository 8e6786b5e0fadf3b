"""The composition root: settings in, a running server out."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from paceline_server.alerts.outbox import Outbox
from paceline_server.alerts.receivers import receivers
from paceline_server.api import router
from paceline_server.api.dependencies import Parts
from paceline_server.api.job_metrics import JobCollector
from paceline_server.api.pending import PendingCommands
from paceline_server.ingest.recent import RecentBatches
from paceline_server.ingest.writer import LogWriter
from paceline_server.metrics import Metrics
from paceline_server.settings import Settings, is_loopback
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.tokens import any_token
from paceline_server.store.wake import Wakes
from paceline_server.worker.keep import Receivers
from paceline_server.worker.tick import Rules
from paceline_server.worker.worker import Worker

_log = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 2
_KEEP_ALIVE_SECONDS = 75  # beyond any client's pause: a close that meets a request is an error


class StartError(Exception):
    """The server cannot start; the message is one sentence with the fix."""


@dataclass(frozen=True)
class Program:
    """Everything that runs, and what it runs on."""

    settings: Settings
    database: Database
    wakes: Wakes
    log: LogWriter
    worker: Worker
    outbox: Outbox
    metrics: Metrics

    @property
    def works(self) -> bool:
        return self.settings.role in ("all", "worker")

    def start(self) -> None:
        self.database.migrate()
        self.log.start()
        if self.works:
            self.worker.start()
            self.outbox.start()

    def stop(self) -> None:
        """What is under way is finished first, and leases are given back."""
        self.wakes.close()
        self.worker.stop()
        self.outbox.stop()
        self.log.stop()
        self.database.close()

    def unready(self) -> list[str]:
        return self.worker.unready() if self.works else []


def compose(settings: Settings) -> Program:
    """Build the parts; opens nothing yet."""
    database = Database(
        settings.database_url,
        timeout_seconds=settings.database_timeout_seconds,
        synchronous=settings.sqlite_synchronous,
    )
    wakes, metrics = Wakes(), Metrics()
    recent = RecentBatches() if settings.role == "all" else RecentBatches(0)
    targets = receivers(settings)
    metrics.registry.register(JobCollector(database))
    owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    rules = Rules(
        lease_ns=int(settings.lease_seconds * 1e9),
        batches=settings.batches_per_tick,
        batch_bytes=settings.bytes_per_tick,
        receivers=Receivers(
            incidents=tuple(target.name for target in targets if target.takes_incidents),
            actions=tuple(target.name for target in targets if target.takes_actions),
        ),
    )
    return Program(
        settings=settings,
        database=database,
        wakes=wakes,
        log=LogWriter(database, wakes, metrics, recent),
        worker=Worker(database, wakes, metrics, recent, owner, rules, settings, time.time_ns),
        outbox=Outbox(database, wakes, metrics, owner, targets, settings, time.time_ns),
        metrics=metrics,
    )


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application; its threads live as long as its lifespan."""
    program = compose(settings)
    app = router.build(settings.static_directory or _built_in_pages())
    app.state.program = program
    # What this process works on wakes its streams; other processes' commits must be looked for.
    poll_seconds = 1.0 if settings.role == "all" else 0.2
    app.state.parts = Parts(
        database=program.database,
        log=program.log,
        wakes=program.wakes,
        metrics=program.metrics,
        pending=PendingCommands(program.database, program.wakes.commands, poll_seconds),
        now_ns=time.time_ns,
        unready=program.unready,
        stream_poll_seconds=poll_seconds,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        program.start()
        try:
            yield
        finally:
            program.stop()

    app.router.lifespan_context = lifespan
    return app


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError."""
    if settings.role == "worker":
        _work(settings)
        return
    app = create_app(settings)
    tune_interpreter()
    _check_exposure(settings, app.state.program.database)
    listener = listen(settings)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
    )
    Server(config, app.state.program.wakes).run(sockets=[listener])


class Server(uvicorn.Server):
    """Says where it listens once it does, and ends open streams, for uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, wakes: Wakes) -> None:
        super().__init__(config)
        self._wakes = wakes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (sockets or []) if self.started else []:
            host, port = listener.getsockname()[:2]
            _say(f"Listening on http://{_in_url(host)}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._wakes.close()
        await super().shutdown(sockets)


def tune_interpreter() -> None:
    """For threads that share one interpreter, and batches that make many objects and few cycles.

    Python's own pace would spend a third on looking for cycles; what is loaded by now stays, and
    need not be looked at at all. sqlite3 lets go of the interpreter at each row: a thread that
    reads a thousand would wait as often for a busy one, 5 ms each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(0.0005)


def _work(settings: Settings) -> None:
    """A worker without an interface, until SIGTERM or SIGINT."""
    program = compose(settings)
    tune_interpreter()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    _start(program)
    _say("Working")
    ended.wait()
    program.stop()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _start(program: Program) -> None:
    try:
        program.start()
    except UNAVAILABLE as error:
        raise StartError(f"The database cannot be opened: {_first_line(error)}.") from error


def _check_exposure(settings: Settings, database: Database) -> None:
    """Refuse to let anybody in the network do anything."""
    try:
        database.migrate()
        with database.read() as session:
            guarded = any_token(session)
    except UNAVAILABLE as error:
        raise StartError(f"The database cannot be opened: {_first_line(error)}.") from error
    if not guarded and not is_loopback(settings.host):
        raise StartError(
            f"Without tokens this server listens on loopback only, not on {settings.host}: make"
            " one with `paceline server token create --name NAME --scope operator`."
        )


def listen(settings: Settings) -> socket.socket:
    """Raises StartError."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without, answers take 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, settings.port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {host}:{settings.port}: {error.strerror}; choose another --port."
        ) from error
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", error)).strip().splitlines()[0].rstrip(".")


def _built_in_pages() -> Path | None:
    """Found without importing the package, which holds nothing but files."""
    found = importlib.util.find_spec("paceline_web")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "static"
