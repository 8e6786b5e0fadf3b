"""The composition root: settings in, a running server out."""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from paceline_server.api import router
from paceline_server.api.dependencies import Parts
from paceline_server.api.job_metrics import JobCollector
from paceline_server.api.pending import PendingCommands
from paceline_server.background import Background, database_of
from paceline_server.background_process import BackgroundProcess
from paceline_server.ingest.writer import LogWriter
from paceline_server.interpreter import tune_interpreter
from paceline_server.metrics import ServingMetrics
from paceline_server.policy_file import load_policy
from paceline_server.settings import Settings, is_loopback
from paceline_server.store.database import Database
from paceline_server.store.tokens import any_token
from paceline_server.store.wake import Wakes

_SHUTDOWN_SECONDS = 2
_KEEP_ALIVE_SECONDS = 75  # beyond any client's pause: a close that meets a request is an error


class StartError(Exception):
    """The server cannot start; the message is one sentence with the fix."""


class Works(Protocol):
    """The job worker and the outbox, wherever they run."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def unready(self) -> list[str]: ...


@dataclass(frozen=True)
class ServerRuntime:
    """Everything that runs, and what it runs on."""

    database: Database
    wakes: Wakes
    log: LogWriter
    background: Works | None  # None: other processes work on the jobs
    metrics: ServingMetrics

    def start(self) -> None:
        self.database.migrate()
        self.log.start()
        if self.background is not None:
            self.background.start()

    def stop(self) -> None:
        """What is under way is finished first, and leases are given back."""
        self.wakes.close()
        if self.background is not None:
            self.background.stop()
        self.log.stop()
        self.database.close()

    def unready(self) -> list[str]:
        background = [] if self.background is None else self.background.unready()
        return [*self.log.unready(), *background]


def compose(settings: Settings, *, apart: bool) -> ServerRuntime:
    """Build the parts; opens nothing yet. `apart`: the background in a process of its own."""
    database, wakes, registry = database_of(settings), Wakes(), CollectorRegistry()
    registry.register(JobCollector(database))
    background: Works | None = None
    if settings.role == "all" and apart:
        background = BackgroundProcess(settings, wakes)
        registry.register(background)
    elif settings.role == "all":
        background = Background(settings, database, wakes, registry)
    metrics = ServingMetrics(registry)
    return ServerRuntime(database, wakes, LogWriter(database, wakes, metrics), background, metrics)


def create_app(settings: Settings, *, apart: bool = False) -> FastAPI:
    """The ASGI application; its threads and processes live as long as its lifespan."""
    program = compose(settings, apart=apart)
    app = router.build(settings.static_directory or _built_in_pages())
    app.state.program = program
    # Our own background wakes the streams; what others commit must be looked for.
    poll_seconds = 0.2 if program.background is None else 1.0
    app.state.parts = Parts(
        database=program.database,
        log=program.log,
        wakes=program.wakes,
        metrics=program.metrics,
        pending=PendingCommands(program.database, program.wakes.commands, poll_seconds),
        now_ns=time.time_ns,
        unready=program.unready,
        policy=load_policy(settings.policy),
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
    """Run until SIGTERM or SIGINT. Raises StartError, UnusableError."""
    if settings.role == "worker":
        _work(settings)
        return
    app = create_app(settings, apart=True)
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
    UvicornServer(config, app.state.program.wakes).run(sockets=[listener])


class UvicornServer(uvicorn.Server):
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


def _work(settings: Settings) -> None:
    """The background alone, until SIGTERM or SIGINT."""
    database, wakes = database_of(settings), Wakes()
    background = Background(settings, database, wakes, CollectorRegistry())
    tune_interpreter()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    database.migrate()
    background.start()
    _say("Working")
    ended.wait()
    wakes.close()
    background.stop()
    database.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _check_exposure(settings: Settings, database: Database) -> None:
    """Refuse to let anybody in the network do anything."""
    database.migrate()
    with database.read() as session:
        guarded = any_token(session)
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


def _built_in_pages() -> Path | None:
    """Found without importing the package, which holds nothing but files."""
    found = importlib.util.find_spec("paceline_web")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "static"
