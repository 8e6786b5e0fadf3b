"""The hot log: append, read from a cursor, prune behind all cursors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.models import Boot, HotLog, Job
from paceline_wire.batch import Batch

FINISHED = ("finished", "failed", "stopped")

_WALKED_TOGETHER = 100


class Entry(NamedTuple):
    """A batch as it came."""

    batch: Batch
    payload: bytes
    received_ns: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.batch.agent_id, self.batch.boot_id, self.batch.sequence


def append(session: Session, batch: Batch, payload: bytes, received_ns: int) -> bool:
    """False if this batch was stored before, pruned since or not."""
    return append_all(session, [Entry(batch, payload, received_ns)])[0]


def append_all(session: Session, entries: Sequence[Entry]) -> list[bool]:
    """In order, with one statement for all; for each what `append` says of it."""
    pruned = _pruned(session, entries)
    new = [entry for entry in entries if entry.key[2] > pruned.get(entry.key[:2], -1)]
    stored: set[tuple[str, str, int]] = set()
    if new:
        columns = HotLog.agent_id, HotLog.boot_id, HotLog.sequence
        statement = (
            insert_into(session, HotLog)
            .on_conflict_do_nothing(index_elements=["agent_id", "boot_id", "sequence"])
            .returning(*columns)
        )
        stored = {tuple(row) for row in session.execute(statement, [_row(one) for one in new])}
    answers = []
    for entry in entries:
        answers.append(entry.key in stored)
        stored.discard(entry.key)  # the same once more is a repetition
    return answers


def _row(entry: Entry) -> dict[str, object]:
    agent_id, boot_id, sequence = entry.key
    return {
        "agent_id": agent_id,
        "boot_id": boot_id,
        "sequence": sequence,
        "received_ns": entry.received_ns,
        "size_bytes": len(entry.payload),
        "payload": entry.payload,
    }


def _pruned(session: Session, entries: Sequence[Entry]) -> dict[tuple[str, str], int]:
    """By boot, the last sequence number that was stored once and is no longer here."""
    agents = {entry.batch.agent_id for entry in entries}
    boots = session.scalars(
        select(Boot).where(Boot.agent_id.in_(agents), Boot.pruned_sequence.is_not(None))
    )
    return {(boot.agent_id, boot.boot_id): boot.pruned_sequence or 0 for boot in boots}


def newest_log_id(session: Session) -> int:
    return session.scalar(select(func.max(HotLog.id))) or 0


def read_log(session: Session, after: int, limit: int) -> list[HotLog]:
    query = select(HotLog).where(HotLog.id > after).order_by(HotLog.id).limit(limit)
    return list(session.scalars(query))


def walk_log(session: Session, after: int, most: int) -> Iterator[HotLog]:
    """Up to `most` entries after a position, a few in memory at a time."""
    while most > 0:
        entries = read_log(session, after, min(most, _WALKED_TOGETHER))
        yield from entries
        if not entries:
            return
        after = entries[-1].id
        most -= len(entries)
        session.expunge_all()


def position_at(session: Session, received_ns: int) -> int:
    """The last entry that had come by then; 0: none that is kept."""
    query = select(func.max(HotLog.id)).where(HotLog.received_ns < received_ns)
    return session.scalar(query) or 0


def oldest_unread_ns(session: Session, cursor: int) -> int | None:
    query = select(HotLog.received_ns).where(HotLog.id > cursor).order_by(HotLog.id).limit(1)
    return session.scalar(query)


def prune_log(session: Session, before_ns: int, keep_bytes: int) -> int:
    """Drop what is older than `before_ns`, and more if there is too much; never the unread.

    Returns how many batches were dropped. What was dropped is remembered as duplicate.
    """
    last = _last_to_drop(session, before_ns, keep_bytes)
    if last is None:
        return 0
    dropped = session.execute(
        select(HotLog.agent_id, HotLog.boot_id, func.max(HotLog.sequence), func.count())
        .where(HotLog.id <= last)
        .group_by(HotLog.agent_id, HotLog.boot_id)
    ).all()
    for agent_id, boot_id, sequence, _count in dropped:
        boot = session.get_one(Boot, (agent_id, boot_id))
        boot.pruned_sequence = max(boot.pruned_sequence or 0, sequence)
    session.execute(delete(HotLog).where(HotLog.id <= last))
    return sum(count for _, _, _, count in dropped)


def _last_to_drop(session: Session, before_ns: int, keep_bytes: int) -> int | None:
    old = session.scalar(select(func.max(HotLog.id)).where(HotLog.received_ns < before_ns)) or 0
    behind = func.sum(HotLog.size_bytes).over(order_by=HotLog.id.desc())
    sizes = select(HotLog.id, behind.label("newer_bytes")).subquery()
    excess = session.scalar(select(func.max(sizes.c.id)).where(sizes.c.newer_bytes > keep_bytes))
    last = max(old, excess or 0)
    unread = session.scalar(select(func.min(Job.cursor)).where(Job.state.not_in(FINISHED)))
    if unread is not None:
        last = min(last, unread)
    return last or None
