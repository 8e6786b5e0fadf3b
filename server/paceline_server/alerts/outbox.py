"""Delivery of the outbox: in order, with retries, by one process at a time.

A row that is delivered just as the process dies is delivered once more by the next one; its id is
the same at each attempt. Each receiver has its own thread and lease, so a receiver that is slow or
down delays only its own rows.
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
from sqlalchemy import or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from paceline_server.act.announce import IncidentAlert, Notice
from paceline_server.alerts.receivers import DeliveryError, Receiver, RefusedError
from paceline_server.alerts.transport import receiver_client
from paceline_server.detect.kinds import SEVERITIES, Severity
from paceline_server.metrics import BackgroundMetrics
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.leases import LeaseLostError, acquire, fence, is_held, release
from paceline_server.store.models import IncidentRow, JobRow, OutboxRow
from paceline_server.store.signals import CommitSignals

_log = logging.getLogger(__name__)
_LEASE_NS = 15_000_000_000  # longer than a delivery's timeout, so it never expires during one
_POLL_SECONDS = 1.0
_STALLED_SECONDS = 30.0  # longer than the timeouts of a delivery and of the database
_BACKOFF_MAXIMUM_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 600.0  # upper limit of Retry-After: alerts are waiting
_ENDED_NS = 86_400_000_000_000  # a failed job keeps the incidents that explain why it failed
_ATTEMPTS = 100  # more than an hour; the alert is out of date by then
_notices: msgspec.json.Decoder[Notice] = msgspec.json.Decoder(Notice)


class DeliverySettings(Protocol):
    """Settings of deliveries."""

    @property
    def alert_repeat_seconds(self) -> float: ...
    @property
    def allow_local_receivers(self) -> bool: ...


class AlertDelivery:
    """The delivery thread of one receiver."""

    def __init__(
        self,
        database: Database,
        signals: CommitSignals,
        metrics: BackgroundMetrics,
        owner: str,
        target: Receiver,
        settings: DeliverySettings,
        now_ns: Callable[[], int],
    ) -> None:
        self._database = database
        self._signals = signals
        self._metrics = metrics
        self._owner = owner
        self._target = target
        self._lease = f"outbox:{target.name}"
        self._settings = settings
        self._now_ns = now_ns
        self._epoch: int | None = None
        self._renewed_ns = 0
        self._last_repeat = self._last_pass = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._lease, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._last_pass = time.monotonic()
        self._thread.start()

    def ask_to_stop(self) -> None:
        """End the thread after the current delivery; do not wait for it."""
        self._stop.set()

    def stop(self) -> None:
        """End the thread after the current delivery."""
        self.ask_to_stop()
        if self._thread.is_alive():
            self._thread.join()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready; empty if it is."""
        if not self._thread.is_alive():
            return [f"{self._lease}: not running"]
        is_stalled = time.monotonic() - self._last_pass > _STALLED_SECONDS
        return [f"{self._lease}: stalled"] if is_stalled else []

    def _run(self) -> None:
        last_count = 0
        with receiver_client(self._settings.allow_local_receivers) as client:
            while not self._stop.is_set():
                try:
                    self._run_pass(client)
                except SQLAlchemyError as error:  # unavailable, or a table or permission is missing
                    _log.warning("outbox %s cannot be read: %s", self._target.name, error)
                    self._epoch = None
                except LeaseLostError:
                    self._epoch = None
                self._last_pass = time.monotonic()
                self._stop.wait(0.05)
                last_count = self._signals.changes.wait(last_count, _POLL_SECONDS)
            self._release_lease()

    def _run_pass(self, client: httpx.Client) -> None:
        if not self._holds_lease():
            return
        while not self._stop.is_set() and self._deliver_next(client):
            pass
        if time.monotonic() - self._last_repeat > self._settings.alert_repeat_seconds:
            self._last_repeat = time.monotonic()
            self._repeat(client)

    def _holds_lease(self) -> bool:
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
        """Deliver the next row; return True if another one may be due."""
        self._last_pass = time.monotonic()
        now_ns = self._now_ns()
        with self._database.read() as session:
            row = _next(session, self._target.name)
        # A longer wait means that the clock was set back: deliver now.
        if row is None or 0 < row.next_attempt_ns - now_ns <= _LONGEST_WAIT_SECONDS * 1e9:
            return False
        self._renew(now_ns)
        try:
            self._target.deliver(client, f"paceline-{row.id}", _decoded(row), now_ns)
        except DeliveryError as error:
            self._metrics.deliveries.labels(self._target.name, "failed").inc()
            self._record_failure(row, error)
            return isinstance(error, RefusedError)
        self._metrics.deliveries.labels(self._target.name, "delivered").inc()
        self._update(row.id, finished_ns=self._now_ns(), error=None, attempts=row.attempts + 1)
        return True

    def _record_failure(self, row: OutboxRow, error: DeliveryError) -> None:
        attempts = row.attempts + 1
        is_final = isinstance(error, RefusedError) or attempts >= _ATTEMPTS
        if is_final or attempts == 1:
            _log.warning(
                "%s notice of %s not delivered to %s: %s (%s)",
                row.event,
                row.subject,
                self._target.name,
                error,
                "giving up" if is_final else "will retry",
            )
        now_ns = self._now_ns()
        wait_seconds = max(_backoff_seconds(attempts), error.retry_after_seconds)
        self._update(
            row.id,
            attempts=attempts,
            error=str(error).replace("\0", "")[:1000],
            next_attempt_ns=now_ns + int(min(wait_seconds, _LONGEST_WAIT_SECONDS) * 1e9),
            finished_ns=now_ns if is_final else None,
        )

    def _update(self, row_id: int, **values: object) -> None:
        with self._database.write() as session:
            self._fence(session, self._now_ns())
            row = session.get_one(OutboxRow, row_id)
            for name, value in values.items():
                setattr(row, name, value)

    def _repeat(self, client: httpx.Client) -> None:
        with self._database.read() as session:
            firing = firing_alerts(session, self._target.minimum_severity, self._now_ns())
        try:
            self._target.repeat(client, firing, self._now_ns())
        except DeliveryError as error:
            self._metrics.deliveries.labels(self._target.name, "failed").inc()
            _log.warning("firing alerts not repeated to %s: %s", self._target.name, error)

    def _release_lease(self) -> None:
        if self._epoch is None:
            return
        try:
            with self._database.write() as session:
                release(session, self._lease, self._owner, self._epoch)
        except UNAVAILABLE as error:
            _log.warning("lease %s not released, it will expire: %s", self._lease, error)


def _decoded(row: OutboxRow) -> Notice:
    """Return the notice of a row. Raises RefusedError if another version wrote it differently."""
    try:
        return _notices.decode(row.body)
    except msgspec.MsgspecError as error:
        raise RefusedError(f"the notice is not valid: {error}") from error


def _next(session: Session, receiver: str) -> OutboxRow | None:
    return session.scalar(
        select(OutboxRow)
        .where(OutboxRow.receiver == receiver, OutboxRow.finished_ns.is_(None))
        .order_by(OutboxRow.id)
        .limit(1)
    )


def firing_alerts(session: Session, minimum: Severity, now_ns: int) -> list[IncidentAlert]:
    """Return the alerts of unresolved incidents, the most urgent first.

    Those of a job that ended more than a day ago are left out: nothing resolves them any more.
    """
    severities = SEVERITIES[SEVERITIES.index(minimum) :]
    query = (
        select(IncidentRow.view, JobRow.id, JobRow.name)
        .join(JobRow, JobRow.id == IncidentRow.job_id)
        .where(IncidentRow.state != "resolved", IncidentRow.severity.in_(severities))
        .where(or_(JobRow.finished_ns.is_(None), JobRow.finished_ns > now_ns - _ENDED_NS))
        .order_by(IncidentRow.urgency.desc(), IncidentRow.opened_ns.desc())
        .limit(1000)
    )
    return [
        IncidentAlert(event="updated", job_id=job_id, job_name=name, incident=view)
        for view, job_id, name in session.execute(query)
    ]


def _backoff_seconds(attempts: int) -> float:
    """Return a delay that doubles from half a second, with jitter so that replicas spread out."""
    ceiling: float = min(_BACKOFF_MAXIMUM_SECONDS, 0.5 * 2.0 ** min(attempts, 10))
    return ceiling * random.uniform(0.5, 1.0)
