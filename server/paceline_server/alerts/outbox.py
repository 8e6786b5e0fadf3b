"""Delivers the outbox of one receiver: in order, again until it is taken, one process at a time.

A row that is delivered just as the process dies is delivered once more by the next one; rows carry
an id that is the same at each try. Each receiver has a thread and a lease of its own, so one that
is slow or down holds up only what is meant for it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

import httpx
import msgspec
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from paceline_server.act.announce import IncidentAlert, Notice
from paceline_server.alerts.receivers import DeliveryError, Receiver, RefusedError
from paceline_server.metrics import BackgroundMetrics
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.leases import LeaseLostError, acquire, fence, is_held, release
from paceline_server.store.models import IncidentRow, JobRow, OutboxRow
from paceline_server.store.wake import Wakes

_log = logging.getLogger(__name__)
_LEASE_NS = 15_000_000_000  # longer than one delivery's timeout, so it is never lost in one
_POLL_SECONDS = 1.0
_STALLED_SECONDS = 30.0  # beyond a delivery's time-outs and the database's
_BACKOFF_MAXIMUM_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 600.0  # whatever a receiver asks for: it is alerts that wait
_ATTEMPTS = 100  # more than an hour; what was not heard by then is no news
_notices: msgspec.json.Decoder[Notice] = msgspec.json.Decoder(Notice)


class DeliveryIntervals(Protocol):
    @property
    def alert_repeat_seconds(self) -> float: ...


class AlertDelivery:
    def __init__(
        self,
        database: Database,
        wakes: Wakes,
        metrics: BackgroundMetrics,
        owner: str,
        target: Receiver,
        pace: DeliveryIntervals,
        now_ns: Callable[[], int],
    ) -> None:
        self._database = database
        self._wakes = wakes
        self._metrics = metrics
        self._owner = owner
        self._target = target
        self._lease = f"outbox:{target.name}"
        self._pace = pace
        self._now_ns = now_ns
        self._epoch: int | None = None
        self._renewed_ns = 0
        self._repeated = self._passed = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._lease, daemon=True)

    def start(self) -> None:
        self._passed = time.monotonic()
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Once the delivery under way is over."""
        self._stop.set()

    def stop(self) -> None:
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join()

    def unready(self) -> list[str]:
        if not self._thread.is_alive():
            return [f"{self._lease}: not running"]
        is_stalled = time.monotonic() - self._passed > _STALLED_SECONDS
        return [f"{self._lease}: stalled"] if is_stalled else []

    def _run(self) -> None:
        seen = 0
        with httpx.Client(follow_redirects=False) as client:
            while not self._stop.is_set():
                try:
                    self._pass(client)
                except SQLAlchemyError as error:  # away, or it has rights or tables no more
                    _log.warning("the outbox cannot be read: %s", error)
                    self._epoch = None
                except LeaseLostError:
                    self._epoch = None
                self._passed = time.monotonic()
                self._stop.wait(0.05)
                seen = self._wakes.changes.wait(seen, _POLL_SECONDS)
            self._give_back()

    def _pass(self, client: httpx.Client) -> None:
        if not self._owned():
            return
        while not self._stop.is_set() and self._deliver_next(client):
            pass
        if time.monotonic() - self._repeated > self._pace.alert_repeat_seconds:
            self._repeated = time.monotonic()
            self._repeat(client)

    def _owned(self) -> bool:
        now_ns = self._now_ns()
        if self._epoch is None:
            with self._database.read() as session:
                if is_held(session, self._lease, now_ns):
                    return False
            with self._database.write() as session:
                self._epoch = acquire(session, self._lease, self._owner, now_ns, _LEASE_NS)
            return self._epoch is not None
        if now_ns - self._renewed_ns > _LEASE_NS // 3:
            self._renew(now_ns)
        return True

    def _renew(self, now_ns: int) -> None:
        with self._database.write() as session:
            self._fence(session, now_ns)

    def _fence(self, session: Session, now_ns: int) -> None:
        assert self._epoch is not None
        fence(session, self._lease, self._owner, self._epoch, now_ns + _LEASE_NS)
        self._renewed_ns = now_ns

    def _deliver_next(self, client: httpx.Client) -> bool:
        """True if there may be more to do at once."""
        self._passed = time.monotonic()
        now_ns = self._now_ns()
        with self._database.read() as session:
            row = _next(session, self._target.name)
        # A wait beyond the longest one is of a clock that was set back since.
        if row is None or 0 < row.next_attempt_ns - now_ns <= _LONGEST_WAIT_SECONDS * 1e9:
            return False
        notice = _notices.decode(row.body)
        self._renew(now_ns)
        try:
            self._target.deliver(client, f"paceline-{row.id}", notice, now_ns)
        except DeliveryError as error:
            self._metrics.deliveries.labels(self._target.name, "failed").inc()
            self._failed(row, error)
            return isinstance(error, RefusedError)
        self._metrics.deliveries.labels(self._target.name, "delivered").inc()
        self._note(row.id, finished_ns=self._now_ns(), error=None, attempts=row.attempts + 1)
        return True

    def _failed(self, row: OutboxRow, error: DeliveryError) -> None:
        attempts = row.attempts + 1
        given_up = isinstance(error, RefusedError) or attempts >= _ATTEMPTS
        if given_up or attempts == 1:
            _log.warning("%s of %s not delivered: %s", row.event, row.subject, error)
        now_ns = self._now_ns()
        wait_seconds = max(_backoff_seconds(attempts), error.retry_after_seconds)
        self._note(
            row.id,
            attempts=attempts,
            error=str(error).replace("\0", "")[:1000],
            next_attempt_ns=now_ns + int(min(wait_seconds, _LONGEST_WAIT_SECONDS) * 1e9),
            finished_ns=now_ns if given_up else None,
        )

    def _note(self, row_id: int, **values: object) -> None:
        with self._database.write() as session:
            self._fence(session, self._now_ns())
            row = session.get_one(OutboxRow, row_id)
            for name, value in values.items():
                setattr(row, name, value)

    def _repeat(self, client: httpx.Client) -> None:
        with self._database.read() as session:
            firing = _firing(session)
        try:
            self._target.repeat(client, firing, self._now_ns())
        except DeliveryError as error:
            self._metrics.deliveries.labels(self._target.name, "failed").inc()
            _log.warning("%s was not reminded: %s", self._target.name, error)

    def _give_back(self) -> None:
        if self._epoch is None:
            return
        try:
            with self._database.write() as session:
                release(session, self._lease, self._owner, self._epoch)
        except UNAVAILABLE as error:
            _log.warning("the outbox's lease was not given back, it will run out: %s", error)


def _next(session: Session, receiver: str) -> OutboxRow | None:
    return session.scalar(
        select(OutboxRow)
        .where(OutboxRow.receiver == receiver, OutboxRow.finished_ns.is_(None))
        .order_by(OutboxRow.id)
        .limit(1)
    )


def _firing(session: Session) -> list[IncidentAlert]:
    query = (
        select(IncidentRow.view, JobRow.id, JobRow.name)
        .join(JobRow, JobRow.id == IncidentRow.job_id)
        .where(IncidentRow.state != "resolved")
        .limit(1000)
    )
    return [
        IncidentAlert(event="updated", job_id=job_id, job_name=name, incident=view)
        for view, job_id, name in session.execute(query)
    ]


def _backoff_seconds(attempts: int) -> float:
    """Doubling from half a second, with jitter so that replicas do not meet."""
    ceiling: float = min(_BACKOFF_MAXIMUM_SECONDS, 0.5 * 2.0 ** min(attempts, 10))
    return ceiling * random.uniform(0.5, 1.0)
