"""The hot log: append batches, read from a cursor, prune behind all cursors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import Table, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.models import BootRow, HotLogRow, JobRow
from paceline_wire.batch import Batch

FINISHED = ("finished", "failed", "stopped")

_ENTRIES_PER_READ = 100
_TABLE: Table = HotLogRow.__table__  # type: ignore[assignment]  # is a Table
_PRUNED = select(BootRow.agent_id, BootRow.boot_id, BootRow.pruned_sequence).where(
    BootRow.agent_id.in_(bindparam("agents", expanding=True)), BootRow.pruned_sequence.is_not(None)
)


class UnwrittenBatch(NamedTuple):
    """A batch as received, decoded and compressed."""

    batch: Batch
    payload: bytes
    received_ns: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.batch.agent_id, self.batch.boot_id, self.batch.sequence


def append(session: Session, batch: Batch, payload: bytes, received_ns: int) -> bool:
    """Append a batch; return False if it was stored before, even if pruned since."""
    return append_all(session, [UnwrittenBatch(batch, payload, received_ns)])[0]


def append_all(session: Session, entries: Sequence[UnwrittenBatch]) -> list[bool]:
    """Append batches in order with one statement; return what `append` would for each."""
    pruned = _pruned(session, entries)
    new = [entry for entry in entries if entry.key[2] > pruned.get(entry.key[:2], -1)]
    stored: set[tuple[str, str, int]] = set()
    if new:
        columns = HotLogRow.agent_id, HotLogRow.boot_id, HotLogRow.sequence
        statement = (
            insert_into(session, _TABLE)
            .on_conflict_do_nothing(index_elements=["agent_id", "boot_id", "sequence"])
            .returning(*columns)
        )
        rows = session.connection().execute(statement, [_row(entry) for entry in new])
        stored = {tuple(row) for row in rows}
    answers = []
    for entry in entries:
        answers.append(entry.key in stored)
        stored.discard(entry.key)  # a second entry with this key is a duplicate
    return answers


def _row(entry: UnwrittenBatch) -> dict[str, object]:
    agent_id, boot_id, sequence = entry.key
    return {
        "agent_id": agent_id,
        "boot_id": boot_id,
        "sequence": sequence,
        "received_ns": entry.received_ns,
        "size_bytes": len(entry.payload),
        "payload": entry.payload,
    }


def _pruned(session: Session, entries: Sequence[UnwrittenBatch]) -> dict[tuple[str, str], int]:
    """Return the last pruned sequence number by (agent id, boot id)."""
    parameters = {"agents": sorted({entry.batch.agent_id for entry in entries})}
    rows = session.connection().execute(_PRUNED, parameters)
    return {(agent_id, boot_id): sequence or 0 for agent_id, boot_id, sequence in rows}


def newest_log_id(session: Session) -> int:
    return session.scalar(select(func.max(HotLogRow.id))) or 0


def read_log(session: Session, after: int, limit: int) -> list[HotLogRow]:
    query = select(HotLogRow).where(HotLogRow.id > after).order_by(HotLogRow.id).limit(limit)
    return list(session.scalars(query))


def read_log_part(
    session: Session, after: int, limit: int, most_bytes: int
) -> tuple[list[HotLogRow], bool]:
    """Return the next entries and whether more follow.

    At most `limit` entries and `most_bytes` bytes are returned, but at least one entry.
    """
    sizes = session.execute(
        select(HotLogRow.id, HotLogRow.size_bytes)
        .where(HotLogRow.id > after)
        .order_by(HotLogRow.id)
        .limit(limit + 1)
    ).all()
    taken, total = 0, 0
    for _, size_bytes in sizes[:limit]:
        total += size_bytes
        if taken and total > most_bytes:
            break
        taken += 1
    return read_log(session, after, taken) if taken else [], taken < len(sizes)


def iterate_log(session: Session, after: int, most: int) -> Iterator[HotLogRow]:
    """Yield up to `most` entries after a position, a few in memory at a time."""
    while most > 0:
        entries = read_log(session, after, min(most, _ENTRIES_PER_READ))
        yield from entries
        if not entries:
            return
        after = entries[-1].id
        most -= len(entries)
        session.expunge_all()


def position_at(session: Session, received_ns: int) -> int:
    """Return the id of the newest entry received before `received_ns`, 0 if there is none."""
    query = select(func.max(HotLogRow.id)).where(HotLogRow.received_ns < received_ns)
    return session.scalar(query) or 0


def received_until(session: Session, position: int) -> int:
    """Return the time at which the newest entry up to this id was received; 0 without one."""
    query = select(HotLogRow.received_ns).where(HotLogRow.id <= position)
    return session.scalar(query.order_by(HotLogRow.id.desc()).limit(1)) or 0


def _least_cursor(session: Session, others: Collection[str] = ()) -> int | None:
    """Return the log position that all unfinished jobs but `others` have reached; None without
    such jobs."""
    is_reader = JobRow.state.not_in(FINISHED), JobRow.id.not_in(others)
    return session.scalar(select(func.min(JobRow.cursor)).where(*is_reader))


def oldest_unread_ns(session: Session) -> int | None:
    """Return when the oldest batch that an unfinished job has not read was received."""
    cursor = _least_cursor(session)
    if cursor is None:
        return None
    query = (
        select(HotLogRow.received_ns).where(HotLogRow.id > cursor).order_by(HotLogRow.id).limit(1)
    )
    return session.scalar(query)


class LogSizes:
    """The size of the hot log, updated incrementally.

    Each call adds up only the entries stored since the previous call, in groups of
    `entries_per_part`: a log of 1 GB needs a few hundred KB here. Other processes may append and
    drop entries in the meantime.
    """

    def __init__(self, entries_per_part: int = 64) -> None:
        self._entries_per_part = entries_per_part
        self._parts: deque[tuple[int, int]] = deque()  # (last id, bytes), oldest first
        self._bytes = 0
        self._last_id = 0

    def newest_in_excess(self, session: Session, keep_bytes: int) -> int:
        """Return the newest entry to drop so that about `keep_bytes` remain; 0: none."""
        oldest = session.scalar(select(func.min(HotLogRow.id))) or 0
        last, size = func.max(HotLogRow.id), func.sum(HotLogRow.size_bytes)
        part = HotLogRow.id // self._entries_per_part
        new_parts = (
            select(last, size).where(HotLogRow.id > self._last_id).group_by(part).order_by(last)
        )
        for last_id, size_bytes in session.execute(new_parts):
            self._parts.append((last_id, int(size_bytes)))
            self._bytes += int(size_bytes)
            self._last_id = last_id
        while self._parts and self._parts[0][0] < oldest:
            self._bytes -= self._parts.popleft()[1]
        excess, kept = 0, self._bytes
        for last_id, size_bytes in self._parts:
            kept -= size_bytes
            if kept < keep_bytes:
                break
            excess = last_id
        return excess


def newest_to_drop(
    session: Session, before_ns: int, in_excess: int, failing: Collection[str] = ()
) -> int | None:
    """Return the newest entry older than `before_ns` or up to `in_excess` that all jobs have read.

    `failing`: jobs that cannot read it.
    """
    old = (
        session.scalar(select(func.max(HotLogRow.id)).where(HotLogRow.received_ns < before_ns)) or 0
    )
    last = max(old, in_excess)
    unread = _least_cursor(session, failing)
    if unread is not None:
        last = min(last, unread)
    return last or None


def drop_log(session: Session, last: int, most: int) -> int:
    """Drop up to `most` of the oldest entries up to `last`; return how many were dropped.

    Their sequence numbers stay recorded, so that a repeated batch is recognized as a duplicate.
    """
    oldest = (
        select(HotLogRow.id)
        .where(HotLogRow.id <= last)
        .order_by(HotLogRow.id)
        .limit(most)
        .subquery()
    )
    count, until = session.execute(select(func.count(), func.max(oldest.c.id))).one()
    if not count:
        return 0
    dropped = (
        select(
            HotLogRow.agent_id, HotLogRow.boot_id, func.max(HotLogRow.sequence).label("sequence")
        )
        .where(HotLogRow.id <= until)
        .group_by(HotLogRow.agent_id, HotLogRow.boot_id)
        .subquery()
    )
    previous = func.coalesce(BootRow.pruned_sequence, -1)
    session.execute(
        update(BootRow)
        .where(
            BootRow.agent_id == dropped.c.agent_id,
            BootRow.boot_id == dropped.c.boot_id,
            dropped.c.sequence > previous,
        )
        .values(pruned_sequence=dropped.c.sequence)
        .execution_options(synchronize_session=False)
    )
    session.execute(delete(HotLogRow).where(HotLogRow.id <= until))
    return int(count)
