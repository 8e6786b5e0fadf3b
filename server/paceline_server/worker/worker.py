"""The worker's loop: one thread that looks at every unfinished job whose lease it holds.

It looks as soon as batches were stored in this process, and now and then by itself for what other
processes stored. A job that cannot be committed is dropped and taken up again; the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from paceline_server.act.announce import prune_outbox
from paceline_server.metrics import BackgroundMetrics
from paceline_server.store import attachments
from paceline_server.store.changes import prune_changes
from paceline_server.store.commands import prune_commands
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.leases import LeaseLostError, acquire, is_held
from paceline_server.store.log import FINISHED, LogSizes, drop_log, last_to_drop
from paceline_server.store.models import Job
from paceline_server.store.shares import prune_steps
from paceline_server.store.wake import Wakes
from paceline_server.worker.commit import ConflictError
from paceline_server.worker.external_jobs import Elsewhere
from paceline_server.worker.tick import JobWork, Ownership, Rules, lease_name

_log = logging.getLogger(__name__)
_PRUNE_NS = 10_000_000_000
_TOGETHER_NS = 10_000_000_000  # the ranks of a run are heard of within this of the end of one
_ATTACHMENTS_NS = 7 * 86_400 * 1_000_000_000
_DROPPED_TOGETHER = 1024
_STALLED_SECONDS = 15.0
# After a pass the loop rests for so many times as long: the more comes in, the fewer passes it is
# taken in with (each looks at all nodes and ranks), and those who write the log get their turn.
_REST = 2.0
_LONGEST_REST_SECONDS = 0.5  # a quarter of what an alert may take
_AGAIN_NS = 1_000_000_000  # a job that failed for no known reason is taken up again after


class Pace(Protocol):
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
    def changes_kept(self) -> int: ...
    @property
    def steps_kept(self) -> int: ...
    @property
    def step_shares_kept(self) -> int: ...
    @property
    def outbox_retention_seconds(self) -> float: ...
    @property
    def command_retention_seconds(self) -> float: ...


class Worker:
    def __init__(
        self,
        database: Database,
        wakes: Wakes,
        metrics: BackgroundMetrics,
        owner: str,
        rules: Rules,
        pace: Pace,
        now_ns: Callable[[], int],
        is_deaf: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_deaf`: whether nobody takes batches in, so that all nodes only seem silent."""
        self._database = database
        self._wakes = wakes
        self._metrics = metrics
        self._owner = owner
        self._rules = rules
        self._pace = pace
        self._now_ns = now_ns
        self._is_deaf = is_deaf
        self._elsewhere = Elsewhere(database, now_ns)
        self._works: dict[str, JobWork] = {}
        self._not_before_ns: dict[str, int] = {}
        self._stop = threading.Event()
        self._passed = time.monotonic()
        self._pruned_ns = 0
        self._log_sizes = LogSizes()
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        self._passed = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends after the look under way, and gives the leases back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def unready(self) -> list[str]:
        if not self._thread.is_alive():
            return ["worker: not running"]
        if time.monotonic() - self._passed > _STALLED_SECONDS:
            return ["worker: stalled"]
        return [] if self._trouble is None else [f"worker: {self._trouble}"]

    def _run(self) -> None:
        seen = 0
        while not self._stop.is_set():
            began = time.monotonic()
            behind = False if self._is_deaf() else self.look_at_jobs()
            self._passed = time.monotonic()
            took = self._passed - began
            rest = 0.0 if behind else min(_REST * took, _LONGEST_REST_SECONDS)
            self._stop.wait(max(self._pace.tick_minimum_seconds - took, rest))
            seen = self._wakes.work.wait(seen, self._pace.tick_seconds)
        for job_id in list(self._works):
            self._release(job_id)

    def look_at_jobs(self) -> bool:
        """One pass of the loop: all unfinished jobs that are ours or nobody's.

        Returns whether more of the log waits than was read.
        """
        try:
            self._prune()
            if self._elsewhere.look():
                self._wakes.changes.notify()
            jobs = self._unfinished()
        except SQLAlchemyError as error:  # away, or it has rights or tables no more
            self._away(error)
            return False
        self._trouble = None
        behind = False
        for job_id in jobs:
            if self._stop.is_set():
                return False
            behind |= self._look(job_id)
        for job_id in set(self._works) - set(jobs):
            self._release(job_id)
        self._metrics.leases.set(len(self._works))
        return behind

    def _unfinished(self) -> list[str]:
        with self._database.read() as session:
            query = select(Job.id).where(Job.state.not_in(FINISHED)).order_by(Job.created_ns)
            return list(session.scalars(query))

    def _look(self, job_id: str) -> bool:
        now_ns = self._now_ns()
        if now_ns < self._not_before_ns.get(job_id, 0):
            return False
        try:
            work = self._works.get(job_id) or self._take_up(job_id, now_ns)
            if work is None:
                return False
            with self._metrics.tick_seconds.time():
                looked = work.look(now_ns)
        except (LeaseLostError, ConflictError) as error:
            self._drop(job_id, type(error).__name__, str(error))
        except UNAVAILABLE as error:
            self._drop(job_id, "database", str(error))
            self._away(error)
        except Exception:
            # A look that fails must not keep other jobs from being looked at.
            _log.exception("job %s could not be looked at", job_id)
            self._drop(job_id, "error", "see above")
            self._not_before_ns[job_id] = now_ns + _AGAIN_NS
        else:
            if looked.wrote:
                self._wakes.changes.notify()
            if looked.commanded:
                self._wakes.commands.notify()
            if not looked.goes_on:
                self._release(job_id)
            return looked.behind
        return False

    def _take_up(self, job_id: str, now_ns: int) -> JobWork | None:
        name = lease_name(job_id)
        with self._database.read() as session:
            if is_held(session, name, now_ns):
                return None
        with self._database.write() as session:
            epoch = acquire(session, name, self._owner, now_ns, self._rules.lease_ns)
        if epoch is None:
            return None
        _log.info("working on %s in epoch %d", job_id, epoch)
        mine = Ownership(job_id, self._owner, epoch)
        work = JobWork(self._database, self._metrics, self._rules, mine, self._now_ns)
        self._works[job_id] = work
        return work

    def _drop(self, job_id: str, reason: str, detail: str) -> None:
        """Forget what may be ahead of the database. The lease runs out, or is found again."""
        self._metrics.tick_errors.labels(reason).inc()
        _log.warning("a look at %s was rolled back (%s): %s", job_id, reason, detail)
        work = self._works.pop(job_id, None)
        if work is not None and reason != "LeaseLostError":
            self._give_back(work)

    def _release(self, job_id: str) -> None:
        work = self._works.pop(job_id, None)
        if work is not None:
            self._give_back(work)

    def _give_back(self, work: JobWork) -> None:
        try:
            work.release()
        except UNAVAILABLE as error:
            _log.warning("a lease was not given back, it will run out: %s", error)

    def _away(self, error: Exception) -> None:
        if self._trouble is None:
            _log.warning("the database does not answer: %s", error)
        self._trouble = "the database does not answer"

    def _prune(self) -> None:
        now_ns = self._now_ns()
        if 0 <= now_ns - self._pruned_ns < _PRUNE_NS:
            return
        self._pruned_ns = now_ns
        self._prune_log(now_ns - int(self._pace.log_retention_seconds * 1e9))
        with self._database.write() as session:
            prune_changes(session, self._pace.changes_kept)
            prune_outbox(session, now_ns - int(self._pace.outbox_retention_seconds * 1e9))
            prune_commands(session, now_ns - int(self._pace.command_retention_seconds * 1e9))
            attachments.give_up(session, now_ns - _TOGETHER_NS)
            attachments.forget(session, now_ns - _ATTACHMENTS_NS)
            for job_id in self._works:
                prune_steps(session, job_id, self._pace.steps_kept, self._pace.step_shares_kept)
        self._database.give_back_space()

    def _prune_log(self, before_ns: int) -> None:
        """In transactions so short that whoever stores batches hardly waits."""
        with self._database.read() as session:
            excess = self._log_sizes.last_in_excess(session, self._pace.log_retention_bytes)
            last = last_to_drop(session, before_ns, excess)
        while last is not None:
            with self._database.write() as session:
                if drop_log(session, last, _DROPPED_TOGETHER) < _DROPPED_TOGETHER:
                    return
