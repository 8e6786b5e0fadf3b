"""One database for the program: SQLite or PostgreSQL behind the same two doors.

`read()` sees one consistent moment and writes nothing. `write()` is one transaction, committed at
the end. There is one writer at a time, on PostgreSQL too: so ids are in the order of commits (a
reader that goes by a cursor misses none) and writers cannot deadlock. Transactions are therefore
short, and the log writer puts many batches into one. Both raise one of `UNAVAILABLE` when the
database is away, `write()` also when others have kept it busy for too long.
"""

from __future__ import annotations

import sqlite3
import threading
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

# What a database that is away, full or busy raises; anything else is our own mistake.
UNAVAILABLE = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.TimeoutError,
)


class UnusableError(Exception):
    """The database cannot be opened, or is none of ours; the message says why in a sentence."""


# Key of the PostgreSQL advisory lock; arbitrary, but shared by all replicas.
_WRITER = 0x7061636501
_JOURNAL_BYTES = 64 << 20  # a write-ahead log that grew is cut down to it
_PAGES_GIVEN_BACK = 4096  # 16 MB in one go, which takes some milliseconds
# PostgreSQL, appendix A: away, but psycopg speaks of them as of a bug.
_AWAY = frozenset(
    {
        "25006",  # read only: a standby after a failover, or a disk that is nearly full
        "25P03",  # idle in a transaction for too long: this process stood still
    }
)


class Database:
    def __init__(
        self, url: str, *, timeout_seconds: float = 5.0, synchronous: str = "full"
    ) -> None:
        self.is_sqlite = url.startswith("sqlite")
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
            _prepare_sqlite(self._engine, synchronous)
        else:
            _prepare_postgresql(self._engine)
        self._writer = self._engine.execution_options(writes=True)
        self._turns = Turns(timeout_seconds)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self._engine, expire_on_commit=False) as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        with (
            self._turns.take(),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            self._be_the_writer(session.connection())
            yield session

    def migrate(self) -> None:
        """Bring the schema to this version; safe to call from several replicas at once.

        Raises UnusableError.
        """
        try:
            with self._writer.begin() as connection:
                self._migrate(connection)
        except CommandError as error:
            raise UnusableError(
                "The database's schema is of a later version of Paceline: install that one, or"
                " restore a copy from before it."
            ) from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            detail = str(getattr(error, "orig", error)).strip().splitlines()[0].rstrip(".")
            raise UnusableError(
                f"The database cannot be opened: {detail} ({self._engine.url.database})."
            ) from error

    def _migrate(self, connection: Connection) -> None:
        if not self.is_sqlite:  # it takes what it takes, and this process may be slow meanwhile
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
        self._be_the_writer(connection)
        command.upgrade(alembic_config(connection), "head")

    def give_back_space(self) -> None:
        """What was deleted is used again; of what nobody used again, SQLite's file loses a part.

        PostgreSQL sees to it by itself.
        """
        if self.is_sqlite:
            with self._turns.take(), self._engine.connect() as connection:
                raw: Any = connection.connection.driver_connection
                # Not `execute`, which takes the first step, that is one page, and no more.
                raw.executescript(f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK})")

    def ping(self) -> None:
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        self._engine.dispose()

    def _be_the_writer(self, connection: Connection) -> None:
        """SQLite has one writer anyway; PostgreSQL's wait for each other here."""
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITER})


class Turns:
    """Who writes next within this process: whoever has waited longest.

    SQLite lets writers try again now and then, by chance: one that writes without a pause, as the
    log does under load, would starve all others.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @contextmanager
    def take(self) -> Iterator[None]:
        """Raises sqlalchemy.exc.TimeoutError, one of `UNAVAILABLE`."""
        self._wait()
        try:
            yield
        finally:
            self._pass_on()

    def _wait(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=self._timeout_seconds):
            return
        with self._mutex:
            if mine in self._waiting:
                self._waiting.remove(mine)
                raise sqlalchemy.exc.TimeoutError(
                    f"others have written for {self._timeout_seconds} s"
                )
        # It was handed over in the last moment.

    def _pass_on(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


def insert_into(session: Session, table: type[Any] | Table) -> Any:
    """The dialect's own insert; both know `on_conflict_do_nothing` and `..._do_update`."""
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def alembic_config(connection: Connection) -> Config:
    config = Config()
    directory = resources.files("paceline_server.store") / "migrations"
    config.set_main_option("script_location", str(directory))
    config.attributes["connection"] = connection
    return config


def _postgresql_options(timeout_seconds: float) -> dict[str, Any]:
    """A worker that is stopped in the middle of a transaction must not hold its locks for long."""
    milliseconds = int(timeout_seconds * 1000)
    return {
        "connect_timeout": max(2, round(timeout_seconds)),
        "options": f"-c idle_in_transaction_session_timeout={milliseconds}"
        f" -c lock_timeout={milliseconds} -c statement_timeout={3 * milliseconds}",
    }


def _prepare_postgresql(engine: Engine) -> None:
    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        told = context.original_exception
        if getattr(told, "sqlstate", None) in _AWAY:
            context.is_disconnect = True  # a session that began read only would stay so
            raise sqlalchemy.exc.OperationalError(context.statement, context.parameters, told)


def _prepare_sqlite(engine: Any, synchronous: str) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions begin below, not by sqlite3's guess
        if connection.execute("PRAGMA auto_vacuum").fetchone() == (0,):  # of a new file
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # waits for whoever writes
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA journal_size_limit={_JOURNAL_BYTES}")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
