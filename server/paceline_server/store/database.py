"""The server's database: SQLite or PostgreSQL behind the same two methods.

`read()` opens a consistent read-only snapshot. `write()` is one transaction, committed at the end.
There is one writer at a time, on PostgreSQL too. Ids are therefore in commit order (a reader with
a cursor misses none) and writers cannot deadlock. Transactions must be short; the log writer puts
many batches into one. Both methods raise one of `UNAVAILABLE` when the database is unavailable,
`write()` also when other writers kept it busy for too long.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import sqlalchemy.exc
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, Table, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.orm import Session

from paceline_server.store.models import LeaseRow

# Raised when the database is unreachable, full or busy. Any other error is a bug.
UNAVAILABLE = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.TimeoutError,
)


_PROBE = "readiness"  # name of the row that `try_write` updates
_RECENT_SECONDS = 5.0


def first_line(error: Exception) -> str:
    """Return the reason of a database error in one line."""
    return str(getattr(error, "orig", error)).strip().splitlines()[0]


class UnusableError(Exception):
    """The database cannot be opened or is not Paceline's; the message says why."""


# Key of the PostgreSQL advisory lock; arbitrary, but shared by all replicas.
_WRITER = 0x7061636501
_JOURNAL_BYTES = 64 << 20  # a larger write-ahead log is truncated to this size
_PAGES_RECLAIMED = 4096  # 16 MB per call, which takes a few milliseconds
# SQLSTATEs (PostgreSQL, appendix A) that mean unavailable but that psycopg reports as bugs.
_UNAVAILABLE_STATES = frozenset(
    {
        "25006",  # read only: a standby after a failover, or a disk that is nearly full
        "25P03",  # idle in a transaction for too long: this process was stopped
    }
)


def _make_private(path: str | None) -> None:
    """Create a database file for this user only; take an existing one from all other users.

    SQLite gives its other files the same mode. A file that cannot be changed is left as it is.
    """
    if not path or path == ":memory:":
        return
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for name in (path, f"{path}-wal", f"{path}-shm"):
            os.chmod(name, os.stat(name).st_mode & ~0o007)


class Database:
    """A connection pool with one writer at a time."""

    def __init__(
        self, url: str, *, timeout_seconds: float = 5.0, synchronous: str = "full"
    ) -> None:
        self.is_sqlite = url.startswith("sqlite")
        self._written = float("-inf")  # end of the last successful write, on the monotonic clock
        options = (
            {"timeout": timeout_seconds} if self.is_sqlite else _postgresql_options(timeout_seconds)
        )
        self._engine = create_engine(
            url,
            connect_args=options,
            pool_size=16,
            max_overflow=16,
            pool_timeout=timeout_seconds,
            pool_pre_ping=not self.is_sqlite,
        )
        if self.is_sqlite:
            _make_private(self._engine.url.database)
            _prepare_sqlite(self._engine, synchronous)
        else:
            _prepare_postgresql(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        self._write_queue = WriteQueue(timeout_seconds)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a consistent snapshot. Raises one of `UNAVAILABLE`."""
        with Session(self._engine, expire_on_commit=False) as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a transaction that commits at the end. Raises one of `UNAVAILABLE`."""
        with (
            self._write_queue.acquired(),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            self._lock_writes(session.connection())
            yield session
        self._written = time.monotonic()

    def migrate(self) -> None:
        """Upgrade the schema to this version; safe to call from several replicas at once.

        Raises UnusableError.
        """
        try:
            with self._writer.begin() as connection:
                self._migrate(connection)
        except CommandError as error:
            raise UnusableError(
                "The database schema belongs to a later version of Paceline: install that version"
                " or restore a backup from before the upgrade."
            ) from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            detail = str(getattr(error, "orig", error)).strip().splitlines()[0].rstrip(".")
            raise UnusableError(
                f"The database cannot be opened: {detail} ({self._engine.url.database})."
            ) from error

    def _migrate(self, connection: Connection) -> None:
        if not self.is_sqlite:  # a migration may take longer than the timeouts of a connection
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))  # for that of a replica
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
        self._lock_writes(connection)
        command.upgrade(alembic_config(connection), "head")

    def reclaim_space(self) -> None:
        """Return some free pages of the SQLite file to the file system.

        Does nothing on PostgreSQL, whose autovacuum does the same.
        """
        if self.is_sqlite:
            with self._write_queue.acquired(), self._engine.connect() as connection:
                raw: Any = connection.connection.driver_connection
                # Not `execute`, which runs only one step and frees a single page.
                raw.executescript(f"PRAGMA incremental_vacuum({_PAGES_RECLAIMED})")

    def try_write(self) -> None:
        """Write one row, unless something was written a moment ago. Raises one of `UNAVAILABLE`.

        A full or read-only disk still answers queries.
        """
        if time.monotonic() - self._written < _RECENT_SECONDS:
            return
        with self.write() as session:
            row = insert_into(session, LeaseRow).values(
                name=_PROBE, owner="", epoch=0, expires_ns=0
            )
            session.execute(
                row.on_conflict_do_update(
                    index_elements=["name"], set_={"epoch": LeaseRow.epoch + 1}
                )
            )

    def ping(self) -> None:
        """Run a trivial query. Raises one of `UNAVAILABLE`."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Close all pooled connections."""
        self._engine.dispose()

    def _lock_writes(self, connection: Connection) -> None:
        """Wait for other writers of PostgreSQL. SQLite has one writer by design."""
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITER})


class WriteQueue:
    """A first-in, first-out lock for the writers of this process.

    SQLite lets waiting writers retry at random. A writer without pauses, such as the log writer
    under load, would starve all others.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @contextmanager
    def acquired(self) -> Iterator[None]:
        """Hold the lock. Raises sqlalchemy.exc.TimeoutError, one of `UNAVAILABLE`."""
        self._wait()
        try:
            yield
        finally:
            self._release()

    def _wait(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if turn.acquire(timeout=self._timeout_seconds):
            return
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
                raise sqlalchemy.exc.TimeoutError(
                    f"other writers kept the database busy for {self._timeout_seconds:g} s"
                )
        # The lock was handed over at the moment when the wait timed out.

    def _release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


def insert_into(session: Session, table: type[Any] | Table) -> Any:
    """Return the dialect's insert, which supports `on_conflict_do_nothing` and `_do_update`."""
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def alembic_config(connection: Connection) -> Config:
    """Return the migration settings for a connection."""
    config = Config()
    directory = resources.files("paceline_server.store") / "migrations"
    # In the configuration of Alembic, a percent sign begins a reference.
    config.set_main_option("script_location", str(directory).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _postgresql_options(timeout_seconds: float) -> dict[str, Any]:
    """Limit how long a process stopped in the middle of a transaction can hold its locks."""
    milliseconds = int(timeout_seconds * 1000)
    return {
        "connect_timeout": max(2, round(timeout_seconds)),
        "options": f"-c idle_in_transaction_session_timeout={milliseconds}"
        f" -c lock_timeout={milliseconds} -c statement_timeout={3 * milliseconds}",
    }


def _prepare_postgresql(engine: Engine) -> None:
    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        error = context.original_exception
        if getattr(error, "sqlstate", None) in _UNAVAILABLE_STATES:
            context.is_disconnect = True  # a session that began read-only would stay read-only
            raise sqlalchemy.exc.OperationalError(context.statement, context.parameters, error)


def _prepare_sqlite(engine: Any, synchronous: str) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # `begin` below starts transactions, not sqlite3
        if connection.execute("PRAGMA auto_vacuum").fetchone() == (0,):  # a new file
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # waits for the current writer
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA journal_size_limit={_JOURNAL_BYTES}")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
