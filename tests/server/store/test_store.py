"""The schema and what the database itself guarantees, on both databases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.exc
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import func, select, text

from paceline_server.decide.types import AuditEntry
from paceline_server.settings import Settings
from paceline_server.store import audit
from paceline_server.store.changes import changes_after, prune_changes, record_change
from paceline_server.store.commands import reserve_command_ids
from paceline_server.store.database import UNAVAILABLE, Database, WriteQueue, alembic_config
from paceline_server.store.leases import LeaseLostError, acquire, fence, is_held, release
from paceline_server.store.log import LogSizes, append, drop_log, newest_to_drop, read_log_part
from paceline_server.store.models import AuditRow, Base, BootRow, HotLogRow, JobRow
from paceline_wire.batch import Batch
from tests.server.rows import toy_job


def test_migrations_create_the_schema_of_the_models(database: Database) -> None:
    with database.read() as session:
        context = MigrationContext.configure(session.connection())
        assert compare_metadata(context, Base.metadata) == []


def test_migration_is_idempotent(database: Database) -> None:
    database.migrate()


def test_the_server_may_be_installed_below_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path("/workspace/feature%2Frestart")
    monkeypatch.setattr(resources, "files", lambda _: place)
    config = alembic_config(None)  # type: ignore[arg-type]
    assert config.get_main_option("script_location") == str(place / "migrations")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_transaction_of_a_stopped_process_gets_database_unavailable(
    database: Database, wait_for: Callable[..., Any]
) -> None:
    with database.read() as session:
        assert session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        session.execute(text("SET idle_in_transaction_session_timeout = '100ms'"))

        def has_ended() -> bool:
            with database.read() as other:
                query = text("SELECT pid FROM pg_stat_activity WHERE pid = :pid")
                return other.scalar(query, {"pid": pid}) is None

        wait_for(has_ended, "the end of the idle connection")
        with pytest.raises(UNAVAILABLE):
            session.execute(text("SELECT 1"))
    database.ping()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_replica_waits_for_the_migration_of_another(database: Database, database_url: str) -> None:
    impatient = Database(database_url, timeout_seconds=3.0)
    with ThreadPoolExecutor() as threads:
        with database.write() as other:
            migrated = threads.submit(impatient.migrate)
            other.execute(text("SELECT pg_sleep(4)"))
        migrated.result(60)
    impatient.close()


def test_new_connection_reads_while_another_writes(database: Database, database_url: str) -> None:
    url = Settings(database_url=database_url).database_url
    other = Database(url, timeout_seconds=60.0)
    with database.write() as session:
        record_change(session, None, "node", "node-0")
        other.ping()
    other.close()


@pytest.mark.parametrize("statement", ["UPDATE audit SET detail = 'x'", "DELETE FROM audit"])
def test_audit_log_rejects_changes(database: Database, statement: str) -> None:
    entry = AuditEntry(actor="policy", verb="opened", subject="inc-1", detail="NUL \0 is dropped")
    with database.write() as session:
        audit.record(session, None, entry, 1)
    with pytest.raises(sqlalchemy.exc.DBAPIError, match="append-only"), database.write() as session:
        session.execute(text(statement))
    with database.read() as session:
        assert session.scalars(select(AuditRow.detail)).all() == ["NUL  is dropped"]


def test_failed_transaction_is_rolled_back(database: Database) -> None:
    def fail_half_way() -> None:
        with database.write() as session:
            record_change(session, None, "node", "node-0")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with database.read() as session:
        assert changes_after(session, 0, None) == []


def test_lease_has_one_owner_and_a_new_epoch_per_owner(database: Database) -> None:
    with database.write() as session:
        assert acquire(session, "job:1", "a", 100, 10) == 1
        assert acquire(session, "job:1", "b", 105, 10) is None
        fence(session, "job:1", "a", 1, 120)
    with database.write() as session:
        assert acquire(session, "job:1", "b", 115, 10) is None, "the fence renewed it"
        assert acquire(session, "job:1", "b", 121, 10) == 2

    def write_as_the_old_owner() -> None:
        with database.write() as session:
            record_change(session, None, "node", "must not stay")
            fence(session, "job:1", "a", 1, 200)

    with pytest.raises(LeaseLostError):
        write_as_the_old_owner()
    with database.write() as session:
        release(session, "job:1", "a", 1)  # the previous owner's release has no effect
        fence(session, "job:1", "b", 2, 200)
        release(session, "job:1", "b", 2)
        assert acquire(session, "job:1", "a", 122, 10) == 3
        assert changes_after(session, 0, None) == []


def test_lease_written_by_a_wrong_clock_can_be_acquired(database: Database) -> None:
    """The owner died, and the clock was set back by a day."""
    day_ns = 86_400 * 1_000_000_000
    with database.write() as session:
        assert acquire(session, "job:1", "a", day_ns, 10) == 1
        assert is_held(session, "job:1", day_ns)
        assert not is_held(session, "job:1", 5)
        assert acquire(session, "job:1", "b", 5, 10) == 2


def test_command_ids_are_unique(database: Database) -> None:
    taken: list[int] = []

    def take() -> None:
        for _ in range(5):
            with database.write() as session:
                taken.extend(reserve_command_ids(session, 3))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 61))


def test_readers_by_cursor_miss_no_change_of_concurrent_writers(database: Database) -> None:
    """Ids are in commit order: a reader that has seen id n finds all further ids above n."""
    done = threading.Event()
    seen: list[int] = []

    def write(number: int) -> None:
        for _ in range(20):
            with database.write() as session:
                record_change(session, None, "node", str(number))

    def read() -> None:
        position = 0
        while True:
            last = done.is_set()
            with database.read() as session:
                found = [change.id for change in changes_after(session, position, None)]
            seen.extend(found)
            position = found[-1] if found else position
            if last:
                return

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert len(seen) == 60
    assert seen == sorted(seen)


def store(database: Database, sequence: int, received_ns: int, size: int = 10) -> bool:
    batch = Batch(agent_id="node-0", boot_id="boot-1", sequence=sequence, packed_ns=1)
    with database.write() as session:
        if session.get(BootRow, ("node-0", "boot-1")) is None:
            session.add(BootRow(agent_id="node-0", boot_id="boot-1", first_seen_ns=1))
            session.flush()
        return append(session, batch, b"x" * size, received_ns)


def kept(database: Database) -> list[int]:
    with database.read() as session:
        return list(session.scalars(select(HotLogRow.sequence).order_by(HotLogRow.id)))


def prune(database: Database, before_ns: int, keep_bytes: int = 1 << 30) -> int:
    with database.write() as session:
        excess = LogSizes(entries_per_part=1).newest_in_excess(session, keep_bytes)
        last = newest_to_drop(session, before_ns, excess)
        return 0 if last is None else drop_log(session, last, most=100)


def test_log_is_pruned_by_age_and_still_detects_duplicates(database: Database) -> None:
    for sequence in range(5):
        assert store(database, sequence, received_ns=sequence)
    assert prune(database, before_ns=3) == 3
    assert kept(database) == [3, 4]
    assert not store(database, 1, received_ns=9)
    assert store(database, 5, received_ns=9)
    assert prune(database, before_ns=100) == 3
    assert store(database, 6, received_ns=10)
    with database.read() as session:
        assert session.scalar(select(func.max(HotLogRow.id))) == 7, "an id is never used twice"


def test_the_log_is_pruned_by_size(database: Database) -> None:
    for sequence in range(5):
        store(database, sequence, received_ns=sequence, size=100)
    prune(database, before_ns=0, keep_bytes=250)
    assert kept(database) == [2, 3, 4]


def test_log_sizes_include_changes_by_other_processes(database: Database) -> None:
    sizes = LogSizes(entries_per_part=4)

    def excess(keep_bytes: int) -> int:
        with database.read() as session:
            return sizes.newest_in_excess(session, keep_bytes)

    assert excess(0) == 0
    for sequence in range(10):  # ids 1 to 10, in parts of 1..3, 4..7 and 8..10
        store(database, sequence, received_ns=sequence, size=100)
    assert [excess(kept) for kept in (1000, 700, 699, 300, 0)] == [0, 3, 3, 7, 10]
    with database.write() as session:
        assert drop_log(session, 5, most=100) == 5
    assert excess(300) == 7
    for sequence in range(10, 14):
        store(database, sequence, received_ns=sequence, size=100)
    assert [excess(kept) for kept in (700, 400, 200)] == [7, 10, 11]


def test_log_is_dropped_in_parts(database: Database) -> None:
    for sequence in range(5):
        store(database, sequence, received_ns=sequence)
    with database.write() as session:
        assert [drop_log(session, 4, most=3) for _ in range(3)] == [3, 1, 0]
    assert kept(database) == [4]
    assert not store(database, 3, received_ns=9)


def test_log_reads_are_limited_by_number_and_size(database: Database) -> None:
    for sequence, size in enumerate([100, 100, 100, 900, 50]):
        store(database, sequence, received_ns=sequence, size=size)

    def part(after: int, limit: int, most_bytes: int) -> tuple[list[int], bool]:
        with database.read() as session:
            entries, behind = read_log_part(session, after, limit, most_bytes)
            return [entry.sequence for entry in entries], behind

    assert part(0, 2, 1 << 20) == ([0, 1], True)
    assert part(0, 5, 1 << 20) == ([0, 1, 2, 3, 4], False)
    assert part(0, 5, 250) == ([0, 1], True)
    assert part(3, 5, 250) == ([3], True), "one that is larger is read all the same"
    assert part(5, 5, 250) == ([], False)


def test_unread_entries_are_never_pruned(database: Database) -> None:
    for sequence in range(5):
        store(database, sequence, received_ns=sequence)
    with database.write() as session:
        session.add(job("job-1", cursor=2))
    prune(database, before_ns=100, keep_bytes=0)
    assert kept(database) == [2, 3, 4]


def test_only_the_newest_changes_are_stored(database: Database) -> None:
    with database.write() as session:
        for _ in range(10):
            record_change(session, None, "node", "node-0")
        prune_changes(session, 3)
        assert len(changes_after(session, 0, None)) == 3


def job(job_id: str, cursor: int = 0) -> JobRow:
    return toy_job(job_id, state="pending", generation=0, created_ns=time.time_ns(), cursor=cursor)


def test_longest_waiting_writer_is_next_even_next_to_one_without_pauses():
    turns, order = WriteQueue(20.0), []

    def write(name: str) -> None:
        with turns.acquired():
            order.append(name)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    with turns.acquired():
        for number, thread in enumerate(threads, start=1):
            thread.start()
            while len(turns._waiting) < number:
                time.sleep(0.001)
    write("d")  # releases the lock, and requests it again immediately
    for thread in threads:
        thread.join()
    assert order.index("a") < order.index("b") < order.index("c")
    assert order[0] == "a"


def test_writer_that_times_out_does_not_block_the_others():
    turns = WriteQueue(0.01)
    with turns.acquired(), pytest.raises(sqlalchemy.exc.TimeoutError), turns.acquired():
        pass
    with turns.acquired():
        pass
