"""The log writer: one thread that appends batches, many to a transaction.

Requests hand in decoded batches and wait. While one group commits the next one gathers, so that
the cost of a commit is shared by all that came meanwhile. An answer is given only after its
commit: `stored`, or `duplicate` if (agent, boot, sequence) was stored before.
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
from paceline_server.ingest.nodes import hear
from paceline_server.metrics import ServingMetrics
from paceline_server.store import attachments, rank_evidence
from paceline_server.store.commands import finish_command
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.log import UnwrittenBatch, append_all
from paceline_server.store.wake import Wakes
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
# In memory before requests are told to come back. A refusal costs both sides more than a place in
# the queue: all nodes of a large job may come at once.
_WAITING = 8192
_WAITING_BYTES = 64 << 20
_GROUP = 256
# After a group of many the writer rests for as long as it took to write, so that as many more
# gather: a commit costs about as much as to store ten batches.
_MANY = 8
_REST_SECONDS = 0.05
_GROUP_BYTES = 32 << 20
_STALLED_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Arrival:
    batch: Batch
    payload: bytes
    received_ns: int
    answer: Future[Status] = field(default_factory=Future)


class LogWriter:
    def __init__(self, database: Database, wakes: Wakes, metrics: ServingMetrics) -> None:
        self._database = database
        self._wakes = wakes
        self._metrics = metrics
        self._waiting: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._writes_since: float | None = None  # None: it waits for batches
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What was handed in before is still written."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def unready(self) -> list[str]:
        if not self._thread.is_alive():
            return ["log writer: not running"]
        since = self._writes_since
        is_stalled = since is not None and time.monotonic() - since > _STALLED_SECONDS
        return ["log writer: stalled"] if is_stalled else []

    def submit(self, batch: Batch, payload: bytes, received_ns: int) -> Future[Status]:
        """The future raises IngestError. Raises BusyError at once if too much waits."""
        self.refuse_if_full()
        arrival = Arrival(batch, payload, received_ns)
        with self._counting:
            self._waiting_bytes += len(payload)
        self._waiting.put(arrival)
        return arrival.answer

    def refuse_if_full(self) -> None:
        """Raises BusyError. To be asked before work is put into what would be refused."""
        if self._waiting.qsize() >= _WAITING or self._waiting_bytes >= _WAITING_BYTES:
            raise BusyError(f"{self._waiting.qsize()} batches wait to be written")

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            group, last = self._gather(first)
            with self._counting:
                self._waiting_bytes -= sum(len(arrival.payload) for arrival in group)
            began = time.monotonic()
            self._write(group)
            self._writes_since = None
            if last:
                return
            if len(group) >= _MANY:
                time.sleep(min(time.monotonic() - began, _REST_SECONDS))

    def _gather(self, first: Arrival) -> tuple[list[Arrival], bool]:
        group, size = [first], len(first.payload)
        while len(group) < _GROUP and size < _GROUP_BYTES:
            try:
                arrival = self._waiting.get_nowait()
            except queue.Empty:
                break
            if arrival is None:
                return group, True
            group.append(arrival)
            size += len(arrival.payload)
        return group, False

    def _write(self, group: list[Arrival]) -> None:
        """One transaction for all; if the database refuses one, each by itself."""
        self._writes_since = time.monotonic()
        try:
            statuses = self._commit(group)
        except UNAVAILABLE as error:
            _log.warning("the log cannot be written: %s", error)
            _fail(group, UnavailableError("the database does not answer"))
        except (sqlalchemy.exc.SQLAlchemyError, ValueError, OverflowError) as error:
            if len(group) > 1:
                for arrival in group:
                    self._write([arrival])
                return
            _log.error("a batch of %s cannot be stored: %s", group[0].batch.agent_id, error)
            _fail(group, UnstorableError("the database refuses this batch"))
        else:
            self._wakes.work.notify()
            for arrival, status in zip(group, statuses, strict=True):
                self._metrics.batches.labels(status).inc()
                _answer(arrival, status)

    def _commit(self, group: list[Arrival]) -> list[Status]:
        with self._metrics.commit_seconds.time(), self._database.write() as session:
            statuses = _store(session, group)
        self._metrics.bytes.inc(
            sum(
                len(arrival.payload)
                for arrival, status in zip(group, statuses, strict=True)
                if status == "stored"
            )
        )
        return statuses


def _store(session: Session, group: list[Arrival]) -> list[Status]:
    entries = [UnwrittenBatch(one.batch, one.payload, one.received_ns) for one in group]
    stored = append_all(session, entries)
    new = [entry for entry, is_new in zip(entries, stored, strict=True) if is_new]
    if new:
        hear(session, [(entry.batch, entry.received_ns) for entry in new])
    for entry in new:
        for event in entry.batch.events:
            if isinstance(event, CommandResult):
                finish_command(session, entry.batch.agent_id, event, entry.received_ns)
            elif isinstance(event, RankStackTraces | RankDump):
                rank_evidence.keep(session, entry.batch.agent_id, event, entry.received_ns)
            elif isinstance(event, RankAttached):
                attachments.keep(session, entry.batch.agent_id, event, entry.received_ns)
            elif isinstance(event, RankExited):
                attachments.end(session, entry.batch.agent_id, event, entry.received_ns)
    return ["stored" if is_new else "duplicate" for is_new in stored]


def _answer(arrival: Arrival, status: Status) -> None:
    # A request that was given up has cancelled its future; its batch is stored all the same.
    if arrival.answer.set_running_or_notify_cancel():
        arrival.answer.set_result(status)


def _fail(group: list[Arrival], error: IngestError) -> None:
    for arrival in group:
        if arrival.answer.set_running_or_notify_cancel():
            arrival.answer.set_exception(error)
