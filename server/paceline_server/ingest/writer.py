"""The log writer: one thread that appends batches, many per transaction.

Requests submit decoded batches and wait. While one group commits, the next one accumulates, so that
its batches share the cost of one commit. A request is answered only after the commit: `stored`, or
`duplicate` if (agent, boot, sequence) was stored before.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy.exc
from sqlalchemy.orm import Session

from paceline_server.ingest.errors import BusyError, IngestError, UnavailableError, UnstorableError
from paceline_server.ingest.nodes import update_nodes
from paceline_server.metrics import ServingMetrics
from paceline_server.store import attachments, rank_evidence
from paceline_server.store.commands import finish_command
from paceline_server.store.database import UNAVAILABLE, Database, first_line
from paceline_server.store.log import UnwrittenBatch, append_all
from paceline_server.store.signals import CommitSignals
from paceline_wire.batch import (
    Batch,
    CommandResult,
    RankAttached,
    RankDump,
    RankExited,
    RankStackTraces,
)

_log = logging.getLogger(__name__)
Status = Literal["stored", "duplicate"]
# Limits of the queue; beyond them requests get 503. A rejected request costs both sides more than a
# queue entry, and all nodes of a large job may send at the same time.
_QUEUE_BATCHES = 8192
_QUEUE_BYTES = 64 << 20
_GROUP_BATCHES = 256
# After a large group the writer pauses for as long as the write took, so that an equally large
# group accumulates: a commit costs about as much as storing ten batches.
_LARGE_GROUP = 8
_REST_SECONDS = 0.05
_GROUP_BYTES = 32 << 20
_STALLED_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A batch that waits for its commit; `answer` is set after it."""

    batch: Batch
    payload: bytes
    received_ns: int
    answer: Future[Status] = field(default_factory=Future)


class LogWriter:
    """The queue of batches and the thread that writes them."""

    def __init__(self, database: Database, signals: CommitSignals, metrics: ServingMetrics) -> None:
        self._database = database
        self._signals = signals
        self._metrics = metrics
        self._waiting: queue.SimpleQueue[PendingBatch | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._size_lock = threading.Lock()
        self._writing_since: float | None = None  # None: waiting for batches
        self._problem: str | None = None  # error of the last write
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write all submitted batches, then end the thread."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; empty if it is."""
        if not self._thread.is_alive():
            return ["log writer: not running"]
        since = self._writing_since
        if since is not None and time.monotonic() - since > _STALLED_SECONDS:
            return ["log writer: stalled"]
        return [] if self._problem is None else [f"log writer: {self._problem}"]

    def submit(self, batch: Batch, payload: bytes, received_ns: int) -> Future[Status]:
        """Queue a batch for writing.

        Returns:
            A future with the status; it raises IngestError.

        Raises:
            BusyError: the queue is full.
        """
        self.refuse_if_full()
        pending = PendingBatch(batch, payload, received_ns)
        with self._size_lock:
            self._waiting_bytes += len(payload)
        self._waiting.put(pending)
        return pending.answer

    def refuse_if_full(self) -> None:
        """Raise BusyError if the queue is full. Call it before decoding a batch."""
        if self._waiting.qsize() >= _QUEUE_BATCHES or self._waiting_bytes >= _QUEUE_BYTES:
            raise BusyError(f"{self._waiting.qsize()} batches are waiting to be written")

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            group, last = self._gather(first)
            with self._size_lock:
                self._waiting_bytes -= sum(len(pending.payload) for pending in group)
            started = time.monotonic()
            self._write(group)
            self._writing_since = None
            if last:
                return
            if len(group) >= _LARGE_GROUP:
                time.sleep(min(time.monotonic() - started, _REST_SECONDS))

    def _gather(self, first: PendingBatch) -> tuple[list[PendingBatch], bool]:
        group, size = [first], len(first.payload)
        while len(group) < _GROUP_BATCHES and size < _GROUP_BYTES:
            try:
                pending = self._waiting.get_nowait()
            except queue.Empty:
                break
            if pending is None:
                return group, True
            group.append(pending)
            size += len(pending.payload)
        return group, False

    def _write(self, group: list[PendingBatch]) -> None:
        """Write a group in one transaction, or one by one if the database rejects the group."""
        self._writing_since = time.monotonic()
        try:
            statuses = self._commit(group)
        except UNAVAILABLE as error:
            _log.warning("hot log not written, database unavailable: %s", error)
            self._problem = f"the last write failed: {first_line(error)}"
            _fail(group, UnavailableError("the database is unavailable"))
        except (sqlalchemy.exc.SQLAlchemyError, ValueError, OverflowError) as error:
            if len(group) > 1:
                for pending in group:
                    self._write([pending])
                return
            _log.error(
                "batch of agent %s rejected by the database: %s", group[0].batch.agent_id, error
            )
            _fail(group, UnstorableError("the database rejects this batch"))
        else:
            self._problem = None
            if any(_is_urgent(pending.batch) for pending in group):
                self._signals.urgent.notify()
            self._signals.work.notify()
            for pending, status in zip(group, statuses, strict=True):
                self._metrics.batches.labels(status).inc()
                _answer(pending, status)

    def _commit(self, group: list[PendingBatch]) -> list[Status]:
        with self._metrics.commit_seconds.time(), self._database.write() as session:
            statuses = _store(session, group)
        self._metrics.bytes.inc(
            sum(
                len(pending.payload)
                for pending, status in zip(group, statuses, strict=True)
                if status == "stored"
            )
        )
        return statuses


def _store(session: Session, group: list[PendingBatch]) -> list[Status]:
    entries = [
        UnwrittenBatch(pending.batch, pending.payload, pending.received_ns) for pending in group
    ]
    stored = append_all(session, entries)
    new = [entry for entry, is_new in zip(entries, stored, strict=True) if is_new]
    if new:
        update_nodes(session, [(entry.batch, entry.received_ns) for entry in new])
    for entry in new:
        for event in entry.batch.events:
            if isinstance(event, CommandResult):
                finish_command(session, entry.batch.agent_id, event, entry.received_ns)
            elif isinstance(event, RankStackTraces | RankDump):
                rank_evidence.store_evidence(
                    session, entry.batch.agent_id, event, entry.received_ns
                )
            elif isinstance(event, RankAttached):
                attachments.record_attached(session, entry.batch.agent_id, event, entry.received_ns)
            elif isinstance(event, RankExited):
                attachments.record_exit(session, entry.batch.agent_id, event, entry.received_ns)
    return ["stored" if is_new else "duplicate" for is_new in stored]


def _is_urgent(batch: Batch) -> bool:
    """Return whether a rank may have to be replaced, for which the others wait."""
    return any(isinstance(event, RankExited) for event in batch.events)


def _answer(pending: PendingBatch, status: Status) -> None:
    # The future of an aborted request is cancelled; its batch is stored anyway.
    if pending.answer.set_running_or_notify_cancel():
        pending.answer.set_result(status)


def _fail(group: list[PendingBatch], error: IngestError) -> None:
    for pending in group:
        if pending.answer.set_running_or_notify_cancel():
            pending.answer.set_exception(error)
