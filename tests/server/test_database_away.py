"""An unavailable database: agents get 503 and retry, and jobs continue once it is back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy
from simulated_node import SimulatedNode, bearer, post_job, stop_all
from sqlalchemy import func, select

from paceline_server.settings import Settings
from paceline_server.store.models import GenerationRow, HotLogRow
from paceline_wire import batch as wire
from paceline_wire.batch import Batch

Away = Callable[[], Any]


@pytest.fixture
def away(database_url: str) -> Away:
    """Make the database unavailable within a with-block."""
    return (
        _sqlite_away(database_url) if "sqlite" in database_url else _postgresql_away(database_url)
    )


def _sqlite_away(url: str) -> Away:
    @contextmanager
    def away() -> Iterator[None]:
        """Hold the write lock for longer than the timeout."""
        holder = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            holder.execute("ROLLBACK")
            holder.close()

    return away


def _postgresql_away(url: str) -> Away:
    @contextmanager
    def away() -> Iterator[None]:
        """End all connections and allow no new ones."""
        with _administrator(url) as (run_sql, name):
            run_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            run_sql(_END_SESSIONS.format(name))
            try:
                yield
            finally:
                run_sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    return away


_END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"


@contextmanager
def _administrator(url: str) -> Iterator[tuple[Callable[[str], Any], str]]:
    """Yield a function that runs statements as administrator, and the database's name."""
    name = url.rpartition("?")[0].rpartition("/")[2]
    admin_url = Settings(database_url=url.replace(f"/{name}?", "/postgres?")).database_url
    admin = sqlalchemy.create_engine(admin_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        yield connection.exec_driver_sql, name
    admin.dispose()


def post(server: Any, sequence: int) -> httpx.Response:
    batch = Batch(agent_id="probe", boot_id="boot", sequence=sequence, packed_ns=1)
    headers = {"Content-Type": wire.CONTENT_TYPE, **bearer(server.url, "agent")}
    content = wire.encode(batch)
    return server.client.post("/api/v1/ingest", content=content, headers=headers)


def test_ingest_responds_503_and_stores_the_batch_once_the_database_is_back(
    run_server: Callable[..., Any], away: Away, wait_for: Callable[..., Any]
) -> None:
    server = run_server(role="api")
    # Agents send again, too, if a busy machine needs longer than the timeout.
    wait_for(lambda: post(server, 0).status_code == 200, "the first answer")
    with away():
        answer = post(server, 1)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["content-type"] == "application/problem+json"
        assert server.client.get("/healthz").status_code == 200
    wait_for(lambda: post(server, 1).status_code == 200, "the database")
    with server.program.database.read() as session:
        assert session.scalar(select(func.count()).select_from(HotLogRow)) == 2


def test_job_continues_without_restart_or_incident(
    run_server: Callable[..., Any], away: Away, wait_for: Callable[..., Any]
) -> None:
    server = run_server()
    nodes = [SimulatedNode(f"node-{number}", server.url) for number in range(2)]
    for node in nodes:
        node.start()

    def step(job_id: str) -> int:
        answer = server.client.get(f"/api/v1/jobs/{job_id}")
        return answer.json()["step"] or 0 if answer.status_code == 200 else 0

    try:
        job_id = post_job(server.url)
        wait_for(lambda: step(job_id) >= 3, "steps")
        with away():
            wait_for(lambda: not _ready(server), "the server to notice")
        wait_for(lambda: _ready(server), "the server to be ready again")
        reached = step(job_id)
        wait_for(lambda: step(job_id) > reached + 3, "steps again")
        answer = wait_for(lambda: _success(server, "/api/v1/incidents"), "the incidents")
        assert answer.json()["items"] == []
        with server.program.database.read() as session:
            assert session.scalar(select(func.count()).select_from(GenerationRow)) == 1
    finally:
        stop_all(nodes)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_read_only_database_counts_as_unavailable(
    run_server: Callable[..., Any], database_url: str, wait_for: Callable[..., Any]
) -> None:
    """This happens after a failover to a standby, or if a provider makes a full database
    read-only."""
    server = run_server()
    with _administrator(database_url) as (run_sql, name):
        run_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        run_sql(_END_SESSIONS.format(name))
        wait_for(lambda: post(server, 0).status_code == 503, "the status 503")
        wait_for(lambda: not _ready(server), "the worker to notice")
        run_sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    wait_for(lambda: post(server, 0).status_code == 200, "the batch to be stored")
    wait_for(lambda: _ready(server), "the worker to go on")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_worker_and_outbox_survive_a_missing_table(
    run_server: Callable[..., Any], wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """This happens while a backup is restored, or when permissions change while the server runs."""
    server = run_server(webhook_url="http://127.0.0.1:1", allow_local_receivers=True)

    def rename(table: str, to: str) -> None:
        with server.program.database.write() as session:
            session.execute(sqlalchemy.text(f"ALTER TABLE {table} RENAME TO {to}"))

    messages = {"jobs": "the database does not", "outbox": "outbox webhook cannot be read"}
    for table, message in messages.items():
        rename(table, "renamed")
        wait_for(lambda message=message: message in caplog.text, message)
        rename("renamed", table)
        caplog.clear()
    wait_for(lambda: _ready(server), "the worker to go on")


def _ready(server: Any) -> bool:
    return _success(server, "/readyz") is not None


def _success(server: Any, path: str) -> httpx.Response | None:
    """Return a successful response. On a busy machine the timeout may expire."""
    answer: httpx.Response = server.client.get(path)
    return answer if answer.is_success else None


def test_server_without_a_database_exits_with_a_message(
    tmp_path: Path, run_process: Callable[..., Any]
) -> None:
    missing = tmp_path / "missing" / "paceline.db"
    process = run_process("--database-url", f"sqlite:///{missing}", "--port", "0")
    assert process.process.wait(60) == 2
    (line,) = process.log.read_text().splitlines()
    assert "The database cannot be opened" in line
