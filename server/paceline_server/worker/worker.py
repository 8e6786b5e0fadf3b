"""The worker's loop: one thread that runs a tick for every unfinished job whose lease it holds.

It runs as soon as batches are stored in this process, and at regular intervals for those that other
processes stored. A job whose tick fails is dropped and loaded again; the others are not affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from paceline_server.act.announce import prune_outbox
from paceline_server.metrics import BackgroundMetrics
from paceline_server.policy import Mode, Policy
from paceline_server.store import attachments
from paceline_server.store.changes import prune_changes
from paceline_server.store.commands import prune_commands
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.ended_jobs import drop_details
from paceline_server.store.kept_logs import prune_kept_logs
from paceline_server.store.leases import LeaseLostError, acquire, holding, is_held, lease_name
from paceline_server.store.log import FINISHED, LogSizes, drop_log, newest_to_drop
from paceline_server.store.models import JobRow
from paceline_server.store.shares import prune_steps
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.commit import ConflictError
from paceline_server.worker.external_jobs import ExternalJobs
from paceline_server.worker.lease_keeper import LeaseKeeper
from paceline_server.worker.leased_thread import LeasedThread
from paceline_server.worker.tick import JobLease, JobWorker, TickSettings

_log = logging.getLogger(__name__)
_PRUNE_NS = 10_000_000_000
_END_SPREAD_NS = 10_000_000_000  # all ranks of a run report their end within this time
_ATTACHMENT_RETENTION_NS = 7 * 86_400 * 1_000_000_000
_DROPPED_AT_ONCE = 1024
_PRUNE_ENDED_SECONDS = 3600.0
_ENDED_PER_PRUNE = 4
_STALLED_SECONDS = 15.0
# The loop rests for a multiple of the last pass's duration. So with more batches, fewer passes
# process them (each pass reads all nodes and ranks), and writers of the log get their turn.
_REST_FACTOR = 2.0
_LONGEST_REST_SECONDS = 0.5  # a quarter of the time until an alert
# After a command, or the end of a rank, for as long, what agents send next is processed at once:
# ranks wait for it.
_HURRY_SECONDS = 1.0
_HURRY_TICK_SECONDS = 0.02
_ONE_FAILURE_NS = 60_000_000_000  # between failures in a row; else another server may own the job
_RETRY_SECONDS = 1.0  # pause after a tick that failed for an unknown reason


class WorkerSettings(Protocol):
    """The settings that the loop reads."""

    @property
    def tick_seconds(self) -> float: ...
    @property
    def tick_minimum_seconds(self) -> float: ...
    @property
    def log_retention_seconds(self) -> float: ...
    @property
    def log_retention_bytes(self) -> int: ...
    @property
    def kept_log_bytes(self) -> int: ...
    @property
    def step_retention_seconds(self) -> float: ...
    @property
    def changes_kept(self) -> int: ...
    @property
    def steps_kept(self) -> int: ...
    @property
    def step_shares_kept(self) -> int: ...
    @property
    def outbox_retention_seconds(self) -> float: ...
    @property
    def command_retention_seconds(self) -> float: ...
    @property
    def launcher_mode(self) -> Mode: ...


class Worker(LeasedThread):
    def __init__(
        self,
        database: Database,
        signals: CommitSignals,
        metrics: BackgroundMetrics,
        owner: str,
        tick_settings: TickSettings,
        settings: WorkerSettings,
        policy: Policy,
        now_ns: Callable[[], int],
        is_ingest_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a worker.

        `policy`: the policy of external jobs, except its mode.

        `is_ingest_paused`: returns whether no batches are received, so that nodes only seem silent.
        """
        leases = LeaseKeeper(database, owner, tick_settings.lease_ns, now_ns)
        super().__init__("worker", leases, _STALLED_SECONDS)
        self._database = database
        self._signals = signals
        self._metrics = metrics
        self._owner = owner
        self._tick_settings = tick_settings
        self._settings = settings
        self._now_ns = now_ns
        self._is_ingest_paused = is_ingest_paused
        self._external_jobs = ExternalJobs(
            database,
            policy,
            settings.launcher_mode,
            tick_settings.alert_targets.incidents,
            now_ns,
        )
        self._jobs: dict[str, JobWorker] = {}
        self._continued: set[str] = set()  # jobs to load again that had no pause: no warm-up
        self._not_before: dict[str, float] = {}  # by job, on the monotonic clock
        self._failures: dict[str, tuple[int, int]] = {}  # first and last failure of a job in a row
        self._pruned_ns = 0
        self._prune_ended_at = 0.0  # monotonic seconds
        self._hurry_until = 0.0
        self._log_sizes = LogSizes()
        self._problem: str | None = None

    def unready(self) -> list[str]:
        problem = [] if self._problem is None else [f"worker: {self._problem}"]
        return super().unready() or problem

    def _run(self) -> None:
        seen = urgent = 0
        while not self._stop.is_set():
            began = time.monotonic()
            self._leases.advance()
            behind = False if self._is_ingest_paused() else self.run_pass()
            self._last_pass = time.monotonic()
            took = self._last_pass - began
            rest = 0.0 if behind else min(_REST_FACTOR * took, _LONGEST_REST_SECONDS)
            urgent = self._rest(took, rest, urgent)
            seen = self._signals.work.wait(seen, self._settings.tick_seconds)
        for job_id in list(self._jobs):
            self._release(job_id)

    def _rest(self, took: float, rest: float, urgent: int) -> int:
        """Pause after a pass, only shortly in a hurry. Return the number of urgent commits."""
        minimum = self._settings.tick_minimum_seconds
        shortest = max(min(minimum, _HURRY_TICK_SECONDS) - took, 0.0)
        self._stop.wait(shortest)
        if self._last_pass < self._hurry_until:
            return self._signals.urgent.count
        longest = max(minimum - took, rest)
        newest = self._signals.urgent.wait(urgent, longest - shortest)
        if newest != urgent:
            self._hurry_until = time.monotonic() + _HURRY_SECONDS
        return newest

    def run_pass(self) -> bool:
        """Run one tick for each unfinished job whose lease this worker holds or acquires.

        Returns whether the log has more than was read.
        """
        try:
            self._prune()
            if taken_up := self._external_jobs.take_up():
                for job_id in taken_up & self._jobs.keys():
                    self._forget(job_id)  # its rows are those of the next generation
                self._signals.changes.notify()
            jobs = self._unfinished()
        except SQLAlchemyError as error:  # unreachable, or its tables or permissions are missing
            self._database_failed(error)
            return False
        self._problem = None
        behind = False
        for job_id in jobs:
            if self._stop.is_set():
                return False
            behind |= self._tick(job_id)
        for job_id in set(self._jobs) - set(jobs):
            self._release(job_id)
        self._metrics.leases.set(len(self._jobs))
        return behind

    def _unfinished(self) -> list[str]:
        with self._database.read() as session:
            query = (
                select(JobRow.id).where(JobRow.state.not_in(FINISHED)).order_by(JobRow.created_ns)
            )
            return list(session.scalars(query))

    def _tick(self, job_id: str) -> bool:
        self._leases.advance()
        now_ns = self._now_ns()
        if time.monotonic() < self._not_before.get(job_id, 0.0):
            return False
        try:
            job = self._jobs.get(job_id) or self._take_up(job_id, now_ns)
            if job is None:
                return False
            with self._metrics.tick_seconds.time():
                result = job.tick(now_ns)
        except (LeaseLostError, ConflictError) as error:
            self._drop(job_id, type(error).__name__, str(error))
        except UNAVAILABLE as error:
            self._drop(job_id, "database", str(error))
            self._database_failed(error)
        except Exception:
            # A failing tick must not affect the other jobs.
            _log.exception("tick for job %s failed", job_id)
            self._drop(job_id, "error", "see the traceback above")
            first_ns, last_ns = self._failures.get(job_id, (now_ns, now_ns))
            is_in_a_row = 0 <= now_ns - last_ns < _ONE_FAILURE_NS
            self._failures[job_id] = first_ns if is_in_a_row else now_ns, now_ns
            self._not_before[job_id] = time.monotonic() + _RETRY_SECONDS
        else:
            self._failures.pop(job_id, None)
            if result.wrote:
                self._signals.changes.notify()
            if result.commanded:
                self._hurry_until = time.monotonic() + _HURRY_SECONDS
                self._signals.commands.notify()
            if result.is_finished:
                self._release(job_id)
            return result.behind
        return False

    def _take_up(self, job_id: str, now_ns: int) -> JobWorker | None:
        name = lease_name(job_id)
        is_continued = job_id in self._continued
        self._continued.discard(job_id)  # if another server is faster, there will be a pause
        with self._database.read() as session:
            if is_held(session, name, now_ns):
                return None
            if not self._leases.may_take(name, *holding(session, name)):
                return None
        with self._database.write() as session:
            epoch = acquire(session, name, self._owner, now_ns, self._tick_settings.lease_ns)
        if epoch is None:
            return None
        _log.info("took over job %s in epoch %d", job_id, epoch)
        lease = JobLease(job_id, self._owner, epoch)
        self._leases.hold(name, epoch)
        job = JobWorker(
            self._database,
            self._metrics,
            self._tick_settings,
            lease,
            self._now_ns,
            is_continued=is_continued,
        )
        self._jobs[job_id] = job
        return job

    def _drop(self, job_id: str, reason: str, detail: str) -> None:
        """Drop the job's memory, which may be ahead of the database, and release its lease."""
        self._metrics.tick_errors.labels(reason).inc()
        _log.warning("tick for job %s rolled back (%s): %s", job_id, reason, detail)
        self._leases.drop(lease_name(job_id))
        job = self._jobs.pop(job_id, None)
        if job is not None and reason != "LeaseLostError":
            self._release_lease(job)

    def _forget(self, job_id: str) -> None:
        self._leases.drop(lease_name(job_id))
        del self._jobs[job_id]
        self._continued.add(job_id)

    def _release(self, job_id: str) -> None:
        self._leases.drop(lease_name(job_id))
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._release_lease(job)

    def _release_lease(self, job: JobWorker) -> None:
        try:
            job.release()
        except UNAVAILABLE as error:
            _log.warning("a lease was not released, it will expire: %s", error)

    def _database_failed(self, error: Exception) -> None:
        if self._problem is None:
            _log.warning("the database does not respond: %s", error)
        self._problem = "the database does not respond"

    def _prune(self) -> None:
        now_ns = self._now_ns()
        if 0 <= now_ns - self._pruned_ns < _PRUNE_NS:
            return
        self._pruned_ns = now_ns
        self._prune_log(now_ns - int(self._settings.log_retention_seconds * 1e9))
        with self._database.write() as session:
            prune_kept_logs(session, self._settings.kept_log_bytes)
            prune_changes(session, self._settings.changes_kept)
            prune_outbox(session, now_ns - int(self._settings.outbox_retention_seconds * 1e9))
            prune_commands(session, now_ns - int(self._settings.command_retention_seconds * 1e9))
            attachments.discard_ended(session, now_ns - _END_SPREAD_NS)
            attachments.prune_attachments(session, now_ns - _ATTACHMENT_RETENTION_NS)
            for job_id in self._jobs:
                prune_steps(
                    session, job_id, self._settings.steps_kept, self._settings.step_shares_kept
                )
        self._prune_ended_jobs(now_ns)
        self._database.reclaim_space()

    def _prune_ended_jobs(self, now_ns: int) -> None:
        """Delete a little at a time: after an upgrade much may be older than the limit."""
        if time.monotonic() < self._prune_ended_at:
            return
        before_ns = now_ns - int(self._settings.step_retention_seconds * 1e9)
        for _ in range(_ENDED_PER_PRUNE):
            with self._database.write() as session:
                if not drop_details(session, before_ns, _DROPPED_AT_ONCE):
                    self._prune_ended_at = time.monotonic() + _PRUNE_ENDED_SECONDS
                    return

    def _prune_log(self, before_ns: int) -> None:
        """Delete in short transactions, so that writers of batches hardly wait for them.

        A job whose tick has failed for as long as entries are kept no longer keeps them.
        """
        recent_ns = self._now_ns() - _ONE_FAILURE_NS
        failing = [
            job_id
            for job_id, (first_ns, last_ns) in self._failures.items()
            if first_ns < before_ns and last_ns > recent_ns
        ]
        with self._database.read() as session:
            excess = self._log_sizes.newest_in_excess(session, self._settings.log_retention_bytes)
            last = newest_to_drop(session, before_ns, excess, failing)
        while last is not None:
            with self._database.write() as session:
                if drop_log(session, last, _DROPPED_AT_ONCE) < _DROPPED_AT_ONCE:
                    return
