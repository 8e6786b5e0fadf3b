"""The composition root: builds and runs the server from its settings."""

from __future__ import annotations

import importlib.util
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from paceline_server.api import router
from paceline_server.api.dependencies import Parts
from paceline_server.api.job_metrics import JobCollector
from paceline_server.api.pending import PendingCommands
from paceline_server.background import Background, database_of
from paceline_server.background_process import BackgroundProcess
from paceline_server.connections import ConnectionLimits, limits_of_process
from paceline_server.ingest.writer import LogWriter
from paceline_server.interpreter import tune_interpreter
from paceline_server.local_tokens import register_local_tokens
from paceline_server.metrics import ServingMetrics
from paceline_server.policy_file import load_policy
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.policies import record_default
from paceline_server.store.signals import CommitSignals
from paceline_server.store.tokens import (
    LOCAL,
    create_link_code,
    has_configured_tokens,
    has_local_tokens,
)
from paceline_wire.address import is_loopback
from paceline_wire.local_token import TokenFileError

_SHUTDOWN_SECONDS = 2
_TICKS_PER_CERTIFICATE_CHECK = 600  # ticks of uvicorn, ten per second
_KEEP_ALIVE_SECONDS = 75  # longer than any client's pause: a close during a request is an error

_log = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start; the message is one sentence that says how to fix it."""


class BackgroundWork(Protocol):
    """The job worker and the outbox, in this process or in another one."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def unready(self) -> list[str]: ...


@dataclass(frozen=True)
class ServerRuntime:
    """All running parts of the server."""

    state_directory: Path
    database: Database
    signals: CommitSignals
    log: LogWriter
    background: BackgroundWork | None  # None: other processes run the job worker
    metrics: ServingMetrics
    policy_file: Path | None

    def start(self) -> None:
        """Migrate the database and start all threads."""
        self.database.migrate()
        register_local_tokens(self.database, self.state_directory)
        record_default_policy(self.database, self.policy_file)
        self.log.start()
        if self.background is not None:
            self.background.start()

    def stop(self) -> None:
        """Finish current work, release all leases and end all threads."""
        self.signals.close()
        if self.background is not None:
            self.background.stop()
        self.log.stop()
        self.database.close()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; empty if it is."""
        background = [] if self.background is None else self.background.unready()
        return [*self.log.unready(), *background]


def compose(settings: Settings, *, separate_process: bool) -> ServerRuntime:
    """Build the parts without opening anything.

    `separate_process`: run the background work in another process.
    """
    database, signals, registry = database_of(settings), CommitSignals(), CollectorRegistry()
    registry.register(JobCollector(database))
    background: BackgroundWork | None = None
    if settings.role == "all" and separate_process:
        background = BackgroundProcess(settings, signals)
        registry.register(background)
    elif settings.role == "all":
        background = Background(settings, database, signals, registry)
    metrics = ServingMetrics(registry)
    return ServerRuntime(
        settings.state_directory,
        database,
        signals,
        LogWriter(database, signals, metrics),
        background,
        metrics,
        settings.policy,
    )


def record_default_policy(database: Database, path: Path | None) -> None:
    """Record the policy for new jobs as a version, if it has changed."""
    source = "built-in policy" if path is None else f"policy file {path.name}"
    with database.write() as session:
        record_default(session, load_policy(path), source, time.time_ns())


def create_app(settings: Settings, *, separate_process: bool = False) -> FastAPI:
    """Return the ASGI application. Its lifespan starts and stops all threads and processes."""
    program = compose(settings, separate_process=separate_process)
    app = router.build(
        settings.static_directory or _built_in_pages(),
        _host_names(settings),
        urlsplit(settings.external_url or "").netloc,
    )
    app.state.program = program
    # Background work of this server signals its commits; commits of other servers are found by
    # polling.
    poll_seconds = 0.2 if program.background is None else 1.0
    app.state.parts = Parts(
        database=program.database,
        log=program.log,
        signals=program.signals,
        metrics=program.metrics,
        pending=PendingCommands(program.database, program.signals.commands, poll_seconds),
        now_ns=time.time_ns,
        unready=program.unready,
        policy=load_policy(settings.policy),
        metrics_need_token=not (settings.public_metrics or is_loopback(settings.host)),
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


def _host_names(settings: Settings) -> set[str]:
    """Return the names of this server other than the loopback names."""
    names = {settings.host, *settings.allowed_hosts}
    if settings.external_url is not None:
        names.add(urlsplit(settings.external_url).hostname or "")
    if not is_loopback(settings.host):
        names |= {socket.gethostname(), socket.gethostname().partition(".")[0]}
    return names


def serve(settings: Settings) -> None:
    """Run the server until SIGTERM or SIGINT. Raises StartError, UnusableError."""
    if settings.role == "worker":
        _run_worker(settings)
        return
    app = create_app(settings, separate_process=True)
    tune_interpreter()
    _prepare_tokens(settings, app.state.program.database)
    listener = listen(settings)
    config = server_config(app, limits_of_process(), settings)
    database: Database = app.state.program.database
    UvicornServer(config, app.state.program.signals, lambda url: _sign_in_hint(database, url)).run(
        sockets=[listener]
    )


def server_config(
    app: FastAPI, limits: ConnectionLimits, settings: Settings | None = None
) -> uvicorn.Config:
    """Return uvicorn's configuration for HTTP, or HTTPS if the settings have a certificate."""
    tls: dict[str, Any] = {}
    if settings is not None and settings.tls_cert is not None:
        client_ca = settings.tls_client_ca
        tls = {
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_ca_certs": client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
        }
    return uvicorn.Config(
        app,
        http=limits.protocol(),
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        server_header=False,
        **tls,
    )


class UvicornServer(uvicorn.Server):
    """Prints its URL when it listens, and ends open streams at shutdown, because uvicorn waits for
    them.

    `hint` returns a second line for that URL, empty for none.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        signals: CommitSignals,
        hint: Callable[[str], str] = lambda url: "",
    ) -> None:
        super().__init__(config)
        self._signals = signals
        self._hint = hint
        self._certificate_ns = _changed_ns(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (sockets or []) if self.started else []:
            host, port = listener.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            url = f"{scheme}://{_in_url(host)}:{port}"
            _print(f"Listening on {url}")
            if scheme == "http" and not is_loopback(host):
                _log.warning(
                    "the connection is not encrypted: tokens can be read on the network. "
                    "Give --tls-cert and --tls-key, or put a proxy with TLS in front."
                )
            if hint := self._hint(url):
                _print(hint)

    async def on_tick(self, counter: int) -> bool:
        """Load a renewed certificate within a minute; it applies to new connections."""
        if counter % _TICKS_PER_CERTIFICATE_CHECK == 0:
            self.renew_certificate()
        return await super().on_tick(counter)

    def renew_certificate(self) -> None:
        """Load the certificate again if its files have changed."""
        config, changed_ns = self.config, _changed_ns(self.config)
        if config.ssl is None or config.ssl_certfile is None:
            return
        if changed_ns not in (0, self._certificate_ns):
            self._certificate_ns = changed_ns
            try:
                config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            except OSError as error:
                _log.warning("the renewed certificate is not used: %s", error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._signals.close()
        await super().shutdown(sockets)


def _changed_ns(config: uvicorn.Config) -> int:
    """Return when the certificate or its key was last written; 0 if they cannot be read now."""
    files = [Path(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file]
    try:
        return max((file.stat().st_mtime_ns for file in files), default=0)
    except OSError:
        return 0


def _run_worker(settings: Settings) -> None:
    """Run only the background work, until SIGTERM or SIGINT."""
    database, signals = database_of(settings), CommitSignals()
    background = Background(settings, database, signals, CollectorRegistry())
    tune_interpreter()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    database.migrate()
    record_default_policy(database, settings.policy)
    background.start()
    _print("Working")
    stopping.wait()
    signals.close()
    background.stop()
    database.close()


def _sign_in_hint(database: Database, url: str) -> str:
    """Return how to sign in a browser, if the server has a token for its own user."""
    with database.write() as session:
        if not has_local_tokens(session):
            return ""
        if not sys.stdout.isatty():  # a log that others may read must not contain the link
            return f"Sign in a browser with: paceline login --server {url}"
        code = create_link_code(session, LOCAL + "operator", time.time_ns())
    return f"Sign in a browser, once within ten minutes: {url}/login?code={code}"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prepare_tokens(settings: Settings, database: Database) -> None:
    """Create the local tokens.

    Raises StartError if a server without tokens would be reachable by others.
    """
    database.migrate()
    with database.read() as session:
        has_tokens = has_configured_tokens(session)
    if not has_tokens and not is_loopback(settings.host):
        raise StartError(
            f"Cannot listen on {settings.host} without tokens, only on loopback: create a token"
            " with `paceline server token create --name NAME --scope operator`."
        )
    try:
        register_local_tokens(database, settings.state_directory)
    except TokenFileError as error:
        raise StartError(f"{error}.") from error


def listen(settings: Settings) -> socket.socket:
    """Return the socket to listen on: a new one, or that of the process that started this one.

    Raises StartError.
    """
    if settings.fd is not None:
        return _inherited(settings.fd)
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it responses take 40 ms more.
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


def _inherited(fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartError(f"--fd: file descriptor {fd} is no socket: {error.strerror}.") from error
    is_internet = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not (is_listening and is_internet and is_loopback(listener.getsockname()[0])):
        listener.close()
        raise StartError(
            f"--fd: the socket {fd} does not listen on a loopback address; use --host."
        )
    listener.set_inheritable(False)
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _built_in_pages() -> Path | None:
    """Return the directory of the dashboard's files, found without importing its package."""
    found = importlib.util.find_spec("paceline_web")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "static"
