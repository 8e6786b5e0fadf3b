"""Carries out the committed requests to launchers, in one process at a time.

    confirm the lease -> observe -> confirm the lease -> begin -> observe -> ...

The lease is confirmed in the database before each external action, and each pass does at most one
action per request. So a process that was paused cannot repeat what its successor has done, unless
it was paused in the moment between the two; a process that is killed leaves nothing that the next
one does not observe. The same transaction records that the request has begun: until then the
decision may withdraw it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from sqlalchemy.exc import SQLAlchemyError

from paceline_server.decide.types import LaunchRequest, LaunchResult, LaunchState
from paceline_server.launchers.contract import (
    Launcher,
    LauncherError,
    LauncherRefusedError,
    ObservedState,
)
from paceline_server.store import launches
from paceline_server.store.database import Database
from paceline_server.store.leases import LeaseLostError, acquire, fence, holding, is_held, release
from paceline_server.store.models import LaunchRow
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.lease_keeper import LeaseKeeper
from paceline_server.worker.leased_thread import LeasedThread

_log = logging.getLogger(__name__)
LEASE = "launches"
_POLL_SECONDS = 1.0
_STALLED_SECONDS = 120.0  # longer than a pass with several commands that reach their time limit
_BEGUN_NS = 100_000_000  # between two observations of a request that is on its way
_QUEUED_NS = 2_000_000_000  # the same once that takes longer: it may wait in a queue for hours
_QUEUED_AFTER_NS = 60_000_000_000
_RECHECK_NS = 30_000_000_000  # while a proposal waits for a person
_RETRY_NS = 5_000_000_000  # after an error of the launcher
_STATES: dict[ObservedState, LaunchState] = {
    "ready": "waiting",
    "begun": "waiting",
    "done": "done",
    "refused": "failed",
    "over": "over",
}


class LaunchThread(LeasedThread):
    """The thread; only the holder of its lease asks launchers for anything."""

    def __init__(
        self,
        database: Database,
        signals: CommitSignals,
        owner: str,
        lease_ns: int,
        launchers: Mapping[str, Launcher],
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(LEASE, LeaseKeeper(database, owner, lease_ns, now_ns), _STALLED_SECONDS)
        self._database = database
        self._signals = signals
        self._owner = owner
        self._lease_ns = lease_ns
        self._launchers = launchers
        self._now_ns = now_ns
        self._epoch: int | None = None

    def _run(self) -> None:
        seen = 0
        while not self._stop.is_set():
            self._leases.advance()
            is_busy = False
            try:
                is_busy = self.run_pass()
            except SQLAlchemyError as error:
                _log.warning("requests to launchers cannot be read: %s", error)
                self._forget_lease()
            except LeaseLostError:
                self._forget_lease()
            self._last_pass = time.monotonic()
            if is_busy:
                self._stop.wait(_BEGUN_NS / 1e9)
            else:
                self._stop.wait(0.05)
                seen = self._signals.changes.wait(seen, _POLL_SECONDS)
        self._release()
        for launcher in self._launchers.values():
            launcher.close()

    def run_pass(self) -> bool:
        """Bring each request that is due one action closer; return whether one is on its way.

        Raises LeaseLostError.
        """
        with self._database.read() as session:
            rows = launches.unfinished(session)
        if not rows or not self._holds_lease():
            return False
        is_busy = False
        for row in rows:
            if self._stop.is_set():
                return False
            # A longer wait means that the clock was set back.
            if not 0 < row.next_ns - self._now_ns() <= _RECHECK_NS:
                with contextlib.suppress(launches.WithdrawnError):
                    self._carry_out(row)
            is_busy |= row.kind == "restart"
        return is_busy

    def _carry_out(self, row: LaunchRow) -> None:
        intent, now_ns = row.request, self._now_ns()
        if intent.kind == "check":  # a restart that has begun is finished in any case
            with self._database.read() as session:
                is_wanted = launches.is_wanted(session, intent.action_id, intent.kind)
            if not is_wanted:
                self._record(row, row.result, now_ns, is_final=True)
                return
        launcher = self._launchers.get(intent.launch.launcher)
        if launcher is None:
            error = f"This server has no backend for {intent.launch.launcher}."
            self._record(row, LaunchResult(state="failed", detail=error), now_ns, is_final=True)
            return
        try:
            self._advance(row, intent, launcher)
        except LauncherRefusedError as error:
            result = LaunchResult(state="failed", detail=str(error))
            is_final = intent.kind == "restart"
            self._record(row, result, self._now_ns() + _RECHECK_NS, is_final=is_final)
        except LauncherError as error:
            _log.warning("%s of action %s is repeated: %s", intent.kind, intent.action_id, error)
            result = LaunchResult(detail=str(error))
            self._record(row, result, self._now_ns() + _RETRY_NS)
        except (SQLAlchemyError, LeaseLostError, launches.WithdrawnError):
            raise
        except Exception as error:
            # A failing backend must not end the thread, which carries out all other requests.
            _log.exception("%s of action %s failed", intent.kind, intent.action_id)
            detail = f"The server cannot ask {launcher.name}: {error!r}"
            self._record(row, LaunchResult(detail=detail), self._now_ns() + _RETRY_NS)

    def _advance(self, row: LaunchRow, intent: LaunchRequest, launcher: Launcher) -> None:
        """Observe the request, and begin what is due.

        Raises LauncherError, or WithdrawnError before anything has begun.
        """
        seen = launcher.observe(intent)
        now_ns = self._now_ns()
        if intent.kind == "check":
            state: LaunchState = "done" if seen.state == "ready" else _STATES[seen.state]
            self._record(row, LaunchResult(state=state, detail=seen.detail), now_ns + _RECHECK_NS)
            return
        state = _STATES[seen.state]
        is_final = state != "waiting"
        is_slow = now_ns - row.created_ns > _QUEUED_AFTER_NS
        next_ns = now_ns + (_QUEUED_NS if is_slow else _BEGUN_NS)
        result = LaunchResult(
            state=state, detail=seen.detail, has_begun=not is_final, has_effect=seen.has_effect
        )
        self._record(row, result, next_ns, is_final=is_final, begins=seen.state == "ready")
        if not is_final:
            # The transaction above has confirmed the lease, and that the request may begin.
            launcher.begin(intent, seen)

    def _record(
        self,
        row: LaunchRow,
        result: LaunchResult,
        next_ns: int,
        *,
        is_final: bool = False,
        begins: bool = False,
    ) -> None:
        """Store what the launcher shows.

        `begins`: nothing was done for the restart yet. Raises WithdrawnError, then also if its
        action has ended.
        """
        assert self._epoch is not None
        with self._database.write() as session:
            now_ns = self._now_ns()
            fence(session, LEASE, self._owner, self._epoch, now_ns + self._lease_ns)
            is_over = begins and not launches.is_wanted(session, row.action_id, row.request.kind)
            if is_over:
                result = LaunchResult(state="failed", detail="Its action has ended before.")
            finished_ns = now_ns if is_final or is_over else None
            is_news = launches.record(session, row, result, next_ns, finished_ns)
        if is_news:
            self._signals.work.notify()
        if is_over:
            raise launches.WithdrawnError(row.action_id)

    # --- the lease -------------------------------------------------------------------------

    def _holds_lease(self) -> bool:
        if self._epoch is not None:
            return True
        now_ns = self._now_ns()
        with self._database.read() as session:
            if is_held(session, LEASE, now_ns):
                return False
            if not self._leases.may_take(LEASE, *holding(session, LEASE)):
                return False
        with self._database.write() as session:
            self._epoch = acquire(session, LEASE, self._owner, now_ns, self._lease_ns)
        if self._epoch is not None:
            self._leases.hold(LEASE, self._epoch)
        return self._epoch is not None

    def _forget_lease(self) -> None:
        self._epoch = None
        self._leases.drop(LEASE)

    def _release(self) -> None:
        epoch = self._epoch
        self._forget_lease()
        if epoch is None:
            return
        try:
            with self._database.write() as session:
                release(session, LEASE, self._owner, epoch)
        except SQLAlchemyError as error:
            _log.warning("lease %s not released, it will expire: %s", LEASE, error)
