"""One tick of one job: snapshot -> feed -> detect -> decide -> commit.

The snapshot is read in one transaction and is never changed. Between it and the commit nothing is
locked, so a worker that is stopped at this point does not block others. Everything is written in
one transaction that begins with a fence: if another worker has taken the job over, nothing is
written.

The server's clock may be set back, so periods count in both directions: what is done regularly does
not wait until the clock has caught up.

If a tick fails, the caller drops the `JobWorker`: its memory is then ahead of the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy.orm import Session

from paceline_server.decide.types import Decision
from paceline_server.engine.types import Outcome, Placement
from paceline_server.metrics import BackgroundMetrics
from paceline_server.store import queries
from paceline_server.store.commands import reserve_command_ids
from paceline_server.store.database import Database
from paceline_server.store.leases import fence, lease_name, release
from paceline_server.store.log import FINISHED
from paceline_server.worker.commit import AlertTargets, Commit, write_commit
from paceline_server.worker.decide import decide, decided_columns, is_ending_generation
from paceline_server.worker.detect import Detected, detect
from paceline_server.worker.feed import Fed, feed
from paceline_server.worker.memory import load_memory
from paceline_server.worker.ranks import RankRows
from paceline_server.worker.snapshot import JobColumns, Snapshot, load_snapshot

_COMMAND_IDS = 64  # number of ids reserved in one transaction
_QUIET_NS = 500_000_000  # longest delay until changes that can wait are written
_ENGINE_MEMORY_NS = 5_000_000_000
_ENGINE_MEMORY_NS_PER_BYTE = 10_000  # 100 kB/s: that of a long job has 4 MB
_FLEET_NS = 600_000_000_000  # how often the fleet's failures are read: they change slowly
_FLEET_SINCE_NS = 90 * 86_400_000_000_000
_RANK_PAUSE_NS = 400_000  # per rank: 10,240 ranks are written every 4 s, 128 at each tick


@dataclass(frozen=True, slots=True)
class TickSettings:
    """Settings of a tick. `batches` and `batch_bytes` limit how much of the log one tick reads."""

    lease_ns: int
    batches: int
    batch_bytes: int
    alert_targets: AlertTargets


@dataclass(frozen=True, slots=True)
class JobLease:
    """A lease that this worker acquired for one job."""

    job_id: str
    owner: str
    epoch: int

    @property
    def name(self) -> str:
        return lease_name(self.job_id)


@dataclass(frozen=True, slots=True)
class TickResult:
    is_finished: bool  # the job has ended
    wrote: bool  # whether there are changes for clients to read
    commanded: bool  # whether there are commands for agents
    behind: bool  # whether the log has more than was read


class JobWorker:
    """One job in one worker, from acquiring its lease to losing it."""

    def __init__(
        self,
        database: Database,
        metrics: BackgroundMetrics,
        settings: TickSettings,
        lease: JobLease,
        clock: Callable[[], int],
        *,
        is_continued: bool = False,
    ) -> None:
        """Rebuild the engine, which takes long if the log is long.

        `is_continued`: this process worked on the job until now, so nothing was missed.
        """
        self._database = database
        self._clock = clock
        self._metrics = metrics
        self._settings = settings
        self._lease = lease
        self._renewed_ns = clock()
        self._memory = load_memory(database, lease.job_id, clock, self._renew)
        if is_continued:
            self._memory.warm_up.skip()
        self._command_ids: Iterator[int] = iter(())
        self._written_ns = clock()
        self._engine_memory_ns = 0
        self._engine_memory_pause_ns = _ENGINE_MEMORY_NS
        self._ranks_written_ns = 0
        self._fleet_ns = 0

    def tick(self, now_ns: int) -> TickResult:
        """Run all stages once. Any exception means that nothing was committed."""
        snapshot = self.snapshot(now_ns)
        fed = self.feed(snapshot)
        detected = self.detect(snapshot, fed, now_ns)
        decision = self.decide(snapshot, detected, now_ns)
        commit = self.prepare(snapshot, detected, decision, now_ns)
        return self.commit(snapshot, commit, now_ns)

    # --- the stages ------------------------------------------------------------------------

    def snapshot(self, now_ns: int) -> Snapshot:
        self._memory.warm_up.begin_tick(now_ns)
        reads_fleet = abs(now_ns - self._fleet_ns) > _FLEET_NS
        self._fleet_ns = now_ns if reads_fleet else self._fleet_ns
        with self._database.read() as session:
            return load_snapshot(
                session,
                self._lease.job_id,
                self._memory.cursor,
                self._settings.batches,
                self._settings.batch_bytes,
                now_ns - _FLEET_SINCE_NS if reads_fleet else None,
            )

    def feed(self, snapshot: Snapshot) -> Fed:
        return feed(self._memory, snapshot, self._metrics)

    def detect(self, snapshot: Snapshot, fed: Fed, now_ns: int) -> Detected:
        # While the generation is being stopped its silent ranks are no problem.
        if is_ending_generation(snapshot):
            self._memory.engine.suspend()
        else:
            self._memory.engine.resume()
        return detect(self._memory, snapshot, fed, now_ns)

    def decide(self, snapshot: Snapshot, detected: Detected, now_ns: int) -> Decision:
        return decide(self._memory, snapshot, detected, now_ns, self._next_command_id)

    def prepare(
        self, snapshot: Snapshot, detected: Detected, decision: Decision, now_ns: int
    ) -> Commit:
        """Collect what the tick writes."""
        columns = decided_columns(self._memory, detected, decision, now_ns)
        outcome = detected.outcome
        memory_age_ns = abs(now_ns - self._engine_memory_ns)
        is_due = columns.state in FINISHED or memory_age_ns > self._engine_memory_pause_ns
        ranks = self._memory.ranks
        placement = _placement(columns, decision, now_ns)
        write_ranks = placement is None and not self._ranks_wait(now_ns)
        return Commit(
            columns=columns,
            decision=decision,
            steps=() if outcome is None else tuple(outcome.steps),
            acknowledged=snapshot.new_acknowledged,
            placement=placement,
            relocated=_relocated(snapshot, outcome, placement),
            rank_rows=tuple(ranks.changed()) if write_ranks else None,
            ranks_changed_visibly=write_ranks and ranks.changed_visibly(),
            # Not at each tick, because it may be large, and the log has what is missing.
            engine_memory=self._memory.engine.memory() if is_due else None,
        )

    def commit(self, snapshot: Snapshot, commit: Commit, now_ns: int) -> TickResult:
        """Write the commit if it is due. Raises LeaseLostError or ConflictError."""
        due = commit.is_urgent or self._is_due(snapshot, now_ns)
        if due:
            with self._database.write() as session:
                self._fence(session, now_ns)
                write_commit(session, snapshot, commit, self._settings.alert_targets, now_ns)
            self._committed(snapshot.job_id, commit, now_ns)
        return TickResult(
            is_finished=commit.columns.state in FINISHED,
            wrote=due,
            commanded=bool(commit.decision.commands),
            behind=snapshot.behind,
        )

    # --- helpers ---------------------------------------------------------------------------

    def _next_command_id(self) -> int:
        command_id = next(self._command_ids, None)
        if command_id is None:
            with self._database.write() as session:
                self._command_ids = iter(reserve_command_ids(session, _COMMAND_IDS))
            command_id = next(self._command_ids)
        return command_id

    def _is_due(self, snapshot: Snapshot, now_ns: int) -> bool:
        """Return whether the lease, or changes that were delayed, have to be written now."""
        if abs(now_ns - self._renewed_ns) > self._settings.lease_ns // 3:
            return True
        changed = bool(snapshot.log or self._memory.ranks.changed())
        return changed and abs(now_ns - self._written_ns) > _QUIET_NS

    def _ranks_wait(self, now_ns: int) -> bool:
        """Return whether the ranks' progress is written at a later tick.

        Writing thousands of rows at each tick would be most of a tick's work.
        """
        ranks = self._memory.ranks
        pause_ns = len(ranks) * _RANK_PAUSE_NS
        return abs(now_ns - self._ranks_written_ns) < pause_ns and not ranks.changed_state()

    def _committed(self, job_id: str, commit: Commit, now_ns: int) -> None:
        self._written_ns = now_ns
        if commit.engine_memory is not None:
            self._engine_memory_ns = now_ns
            pause_ns = len(commit.engine_memory) * _ENGINE_MEMORY_NS_PER_BYTE
            self._engine_memory_pause_ns = max(pause_ns, _ENGINE_MEMORY_NS)
        if commit.placement is None:
            if commit.rank_rows is not None:
                self._memory.ranks.committed()
                self._ranks_written_ns = now_ns
            return
        with self._database.read() as session:
            rows = queries.ranks(session, job_id)
        self._memory.ranks = RankRows(commit.placement.generation, rows)
        self._memory.engine.place(commit.placement)
        self._engine_memory_ns = 0

    def _fence(self, session: Session, now_ns: int) -> None:
        lease = self._lease
        # A slow tick began long ago, so the lease counts from the current time.
        expires_ns = max(now_ns, self._clock()) + self._settings.lease_ns
        fence(session, lease.name, lease.owner, lease.epoch, expires_ns)
        self._renewed_ns = now_ns

    def _renew(self) -> None:
        """Renew the lease during a long rebuild."""
        now_ns = self._clock()
        if abs(now_ns - self._renewed_ns) > self._settings.lease_ns // 3:
            with self._database.write() as session:
                self._fence(session, now_ns)

    def release(self) -> None:
        with self._database.write() as session:
            release(session, self._lease.name, self._lease.owner, self._lease.epoch)


def _relocated(
    snapshot: Snapshot, outcome: Outcome | None, new: Placement | None
) -> Placement | None:
    """Return the running generation's placement if its ranks report another topology."""
    running = None if outcome is None else outcome.placement
    is_same = running is None or running.topology == snapshot.columns.topology
    return None if is_same or new is not None else running


def _placement(columns: JobColumns, decision: Decision, now_ns: int) -> Placement | None:
    """Return the placement of a new generation; None if the generation is the same."""
    if decision.generation is None and decision.ranks is None:
        return None
    views = decision.ranks or []
    return Placement(
        generation=columns.generation,
        topology=columns.topology,
        nodes={view.rank: view.agent_id for view in views},
        gpus={view.rank: view.gpu for view in views},
        metadata=columns.spec.metadata,
        started_ns=now_ns,
    )
