"""Fixtures: real databases, and a real server on a socket."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy

sys.path.insert(0, str(Path(__file__).parent / "fleet"))

from paceline_server.app import ServerRuntime, UvicornServer, create_app, listen, server_config
from paceline_server.connections import ConnectionLimits
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_wire.local_token import read_token, token_path
from tests.forked_python import SERVER, ForkedPython


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    return _wait_for


def _wait_for(condition: Callable[[], Any], what: str = "", seconds: float = 60.0) -> Any:
    """Poll until `condition` returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Start a PostgreSQL server and return its URL without a database name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing XDG_RUNTIME_DIR
        pgserver = importlib.import_module("pgserver")
    # PostgreSQL's user must be able to enter it
    directory = tempfile.mkdtemp(prefix="paceline-pg-")
    with pytest.MonkeyPatch.context() as patch:
        run = pgserver.postgres_server.pg_ctl
        # pgserver gives up after 10 s, and a busy machine may take longer to start it.
        patch.setattr(
            pgserver.postgres_server,
            "pg_ctl",
            lambda words, **options: run(["-t", "120", *words], **options | {"timeout": 130}),
        )
        cluster = pgserver.get_server(directory, cleanup_mode="stop")
    uri = cluster.get_uri()
    # Needed only against power cuts; creating a hundred databases is faster without.
    execute(uri, "ALTER SYSTEM SET fsync = off")
    execute(uri, "SELECT pg_reload_conf()")
    yield uri
    cluster.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the newest schema, to be copied: migrating takes far longer."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgresql(postgresql: str) -> str:
    """Return the name of a database with the newest schema, a template for others."""
    execute(postgresql, "CREATE DATABASE migrated")
    _migrate(postgresql.replace("/postgres?", "/migrated?"))
    return "migrated"


_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new database with the newest schema."""
    if request.param == "sqlite":
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), tmp_path / "test.db")
        return f"sqlite:///{tmp_path}/test.db"
    template = request.getfixturevalue("migrated_postgresql")
    name = f"test_{os.getpid()}_{next(_numbers)}"
    uri: str = request.getfixturevalue("postgresql")
    execute(uri, f"CREATE DATABASE {name} TEMPLATE {template}")
    return uri.replace("/postgres?", f"/{name}?")


def _migrate(url: str) -> None:
    database = Database(Settings(database_url=url).database_url)
    database.migrate()
    database.close()


def execute(uri: str, statement: str) -> None:
    engine = sqlalchemy.create_engine(
        Settings(database_url=uri).database_url, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("any_database") and "postgresql" in parameters.values():
            item.add_marker(pytest.mark.campaign)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    # On a busy machine, a test's thread may rest longer in a transaction than a server's.
    url = Settings(database_url=database_url).database_url
    opened = Database(url, timeout_seconds=60.0, synchronous="normal")
    opened.migrate()
    yield opened
    opened.close()


class RunningServer:
    """The server in a thread of this process; `program` gives access to its parts."""

    def __init__(self, settings: Settings, limits: ConnectionLimits | None = None) -> None:
        app = create_app(settings)
        self.program: ServerRuntime = app.state.program
        self.app = app
        self._socket = listen(settings)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._settings = settings
        # Reused: a new client loads certificates, which costs more than the request.
        self.client = httpx.Client(base_url=self.url, timeout=60.0, verify=False)
        config = server_config(app, limits or ConnectionLimits())
        self._server = UvicornServer(config, self.program.signals)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def start(self) -> None:
        self._thread.start()
        _wait_for(lambda: self._server.started or not self._thread.is_alive(), "the server")
        assert self._server.started
        token = read_token(token_path(self._settings.state_directory, "operator"))
        self.client.headers["Authorization"] = f"Bearer {token}"

    @property
    def agent_token(self) -> str | None:
        return read_token(token_path(self._settings.state_directory, "agent"))

    @property
    def connections(self) -> set[Any]:
        """Return all open connections."""
        return self._server.server_state.connections

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server hangs on shutdown"
        self._socket.close()
        self.client.close()


@pytest.fixture
def run_server(database_url: str) -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def run(**settings: Any) -> RunningServer:
        given = {"database_url": database_url, "port": 0, **settings}
        server = RunningServer(Settings(**given))
        server.start()
        running.append(server)
        return server

    yield run
    for server in running:
        server.stop()


@pytest.fixture
def server(run_server: Callable[..., RunningServer]) -> RunningServer:
    return run_server()


class ServerProcess:
    """A server process: `python -m paceline_server server`, forked, with its output in a file."""

    def __init__(self, database_url: str, log: Path, *arguments: str, **environment: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = ForkedPython(
                ["-m", "paceline_server", "server", "--database-url", database_url, *arguments],
                {**os.environ, **environment},
                modules=SERVER,
                stdout=output.fileno(),
                stderr=output.fileno(),
            )

    def wait_until_up(self) -> str:
        """Wait for the first line of output and return it."""

        def first() -> str | None:
            text = self.log.read_text()
            assert self.process.poll() is None, text
            return text.splitlines()[0] if "\n" in text else None

        line: str = _wait_for(first, "the server process", 60.0)
        return line

    def url(self) -> str:
        return self.wait_until_up().removeprefix("Listening on ")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def run_process(database_url: str, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def run(*arguments: str, **environment: str) -> ServerProcess:
        log = tmp_path / f"server-{len(started)}.log"
        started.append(ServerProcess(database_url, log, *arguments, **environment))
        return started[-1]

    yield run
    for each in started:
        each.end()
