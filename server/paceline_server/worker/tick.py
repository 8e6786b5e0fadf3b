"""One look at one job: read, feed, detect, decide; then everything in one fenced transaction.

Between `know` and `keep` nothing is locked, so a worker that is stopped there holds nobody up.
If anything fails, nothing is kept and the caller drops this object: what it remembers would be
ahead of the database. The next owner, or this one, rebuilds from the log.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace
from sqlalchemy.orm import Session

from paceline_server.decide.decide import decide
from paceline_server.decide.types import Acknowledged, Decision
from paceline_server.engine.types import Outcome, Placement
from paceline_server.metrics import BackgroundMetrics
from paceline_server.store import models, queries
from paceline_server.store.commands import reserve_command_ids
from paceline_server.store.database import Database
from paceline_server.store.leases import fence, release
from paceline_server.store.log import FINISHED
from paceline_server.worker.acknowledgements import checkpoint_step, genuine, merge
from paceline_server.worker.commit import News, Receivers, keep
from paceline_server.worker.earlier_processes import Strangers
from paceline_server.worker.ranks import Ranks
from paceline_server.worker.replay import rebuild
from paceline_server.worker.snapshot import Known, know
from paceline_server.worker.warm_up import Settling
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, RankAcknowledged, RankAttached, RankState

_log = logging.getLogger(__name__)
_COMMAND_IDS = 64  # reserved at once
_QUIET_NS = 500_000_000  # what can wait (a cursor, how long an operation runs) is kept this often
_MEMORY_NS = 5_000_000_000
_RANK_PAUSE_NS = 400_000  # of each rank: 10,240 are kept every 4 s, 128 at each look


@dataclass(frozen=True)
class Rules:
    """`batches` and `batch_bytes` are how much of the log is read at once."""

    lease_ns: int
    batches: int
    batch_bytes: int
    receivers: Receivers


@dataclass(frozen=True)
class Ownership:
    """A lease that was acquired for one job."""

    job_id: str
    owner: str
    epoch: int

    @property
    def lease(self) -> str:
        return lease_name(self.job_id)


@dataclass(frozen=True)
class Looked:
    goes_on: bool  # the job is not over
    wrote: bool  # others have something to read
    commanded: bool  # agents have something to do
    behind: bool  # more of the log waits than was read


def lease_name(job_id: str) -> str:
    return f"job:{job_id}"


class JobWork:
    """One job in one worker, from acquiring its lease to losing it."""

    def __init__(
        self,
        database: Database,
        metrics: BackgroundMetrics,
        rules: Rules,
        mine: Ownership,
        clock: Callable[[], int],
    ) -> None:
        """Rebuilds the engine, which takes a while on a long log."""
        self._database = database
        self._clock = clock
        self._metrics = metrics
        self._rules = rules
        self._mine = mine
        self._renewed_ns = clock()
        with database.read() as session:
            job = session.get_one(models.Job, mine.job_id)
            rows = queries.ranks(session, mine.job_id)
            said = queries.said(session, job)
        self._strangers = Strangers(job, rows, said)
        rebuilt = rebuild(database, job, self._strangers, self._renew)
        self._engine = rebuilt.engine
        self._late = Outcome(steps=rebuilt.steps, findings=list(rebuilt.findings.values()))
        self._cursor = job.cursor
        self._ranks = Ranks(job.generation, rows, said)
        now_ns = clock()
        self._settling = Settling(now_ns, int((job.policy.node_lease_seconds + 1.0) * 1e9))
        self._command_ids: Iterator[int] = iter(())
        self._evaluation: float | None = job.evaluation_loss
        self._kept_ns = now_ns
        self._remembered_ns = 0
        self._ranks_kept_ns = 0

    def look(self, now_ns: int) -> Looked:
        """One pass. Raises whatever keeps it from being committed."""
        self._settling.look(now_ns)
        with self._database.read() as session:
            known = know(
                session,
                self._mine.job_id,
                self._cursor,
                self._rules.batches,
                self._rules.batch_bytes,
            )
            batches = list(self._decoded(known))
            heard = self._hear(known.job, batches)
            new = genuine(session, known.job.id, known.job.generation, heard)
        acknowledged = merge(known.acknowledged, new)
        as_of_ns = self._as_of_ns(known, now_ns)
        outcome = self._conclude(now_ns, as_of_ns)
        decision = Decision()
        if outcome is not None:
            saved = checkpoint_step(acknowledged, known.job.topology.world_size)
            self._update(known.job, outcome, saved, as_of_ns)
            decision = self._decide(known, outcome, acknowledged, now_ns)
        return self._finish(known, decision, outcome, new, now_ns)

    # --- in --------------------------------------------------------------------------------

    def _decoded(self, known: Known) -> Iterator[Batch]:
        for entry in known.log:
            self._cursor = entry.id
            batch = self._strangers.left_out(wire.decode(entry.payload))  # checked when it came
            self._settling.hear(batch, entry.received_ns)
            try:
                self._engine.feed(batch, entry.received_ns)
            except Exception:
                # One agent's nonsense must not keep the job from being watched.
                self._metrics.batches_skipped.inc()
                _log.exception("batch %d of %s skipped", entry.id, batch.agent_id)
            yield batch

    def _hear(self, job: models.Job, batches: list[Batch]) -> list[tuple[str, RankAcknowledged]]:
        heard = []
        for batch in batches:
            for event in batch.events:
                if not _is_of(job, event):
                    continue
                if isinstance(event, RankState):  # the most numerous by far
                    if event.view.evaluation_loss is not None:
                        self._evaluation = event.view.evaluation_loss
                    continue
                self._ranks.hear(batch.agent_id, event)
                if isinstance(event, RankAcknowledged):
                    heard.append((batch.agent_id, event))
                elif isinstance(event, RankAttached):
                    said = event.identity.metadata
                    job.spec = replace(job.spec, metadata={**job.spec.metadata, **said})
        return heard

    # --- through ---------------------------------------------------------------------------

    def _as_of_ns(self, known: Known, now_ns: int) -> int:
        """While more is waiting in the log than was read, who seems silent may be in the rest."""
        return min(now_ns, known.log[-1].received_ns) if known.behind else now_ns

    def _conclude(self, now_ns: int, as_of_ns: int) -> Outcome | None:
        """None: too early to judge."""
        if not self._settling.settled(self._ranks.agents, now_ns):
            return None
        outcome = self._engine.tick(as_of_ns)
        outcome.steps[:0] = self._late.steps
        outcome.findings[:0] = self._late.findings
        self._late = Outcome()
        self._ranks.progress(outcome.progress)
        return outcome

    def _update(self, job: models.Job, outcome: Outcome, saved: int | None, as_of_ns: int) -> None:
        """The job's row as it will be; it is detached from any session."""
        job.ticked_ns = as_of_ns
        job.ledger = outcome.ledger
        job.evaluation_loss = self._evaluation
        if outcome.step_seconds is not None:
            job.step_seconds = outcome.step_seconds
        if saved is not None:
            job.checkpoint_step = max(saved, job.checkpoint_step or 0)
        for step in outcome.steps:
            job.started_ns = job.started_ns or step.started_ns
            job.step = step.step
            job.loss = job.loss if step.loss is None else step.loss
        finished = [step.step for step in outcome.steps]
        known = [job.highest_step, outcome.highest_step, *finished]
        job.highest_step = max((step for step in known if step is not None), default=None)

    def _decide(
        self, known: Known, outcome: Outcome, acknowledged: list[Acknowledged], now_ns: int
    ) -> Decision:
        view = known.view(known.job, self._ranks.views(), acknowledged)
        view = replace(view, ended_received_ns=outcome.ended_received_ns)
        return decide(
            view,
            outcome.findings,
            known.job.policy,
            now_ns,
            next_command_id=self._next_command_id,
            new_id=lambda kind: f"{kind}-{secrets.token_hex(4)}",
        )

    def _next_command_id(self) -> int:
        found = next(self._command_ids, None)
        if found is None:
            with self._database.write() as session:
                self._command_ids = iter(reserve_command_ids(session, _COMMAND_IDS))
            found = next(self._command_ids)
        return found

    # --- out -------------------------------------------------------------------------------

    def _finish(
        self,
        known: Known,
        decision: Decision,
        outcome: Outcome | None,
        new: list[Acknowledged],
        now_ns: int,
    ) -> Looked:
        job = known.job
        job.cursor = self._cursor
        ended_ns = now_ns if outcome is None or outcome.ended_ns is None else outcome.ended_ns
        placement = self._apply(job, decision, now_ns, ended_ns)
        news = News(
            decision=decision,
            steps=outcome.steps if outcome is not None else [],
            acknowledged=new,
            ranks=self._ranks,
            placement=placement,
            memory=self._engine.memory() if self._memory_due(job, now_ns) else None,
            ranks_wait=self._ranks_wait(now_ns),
        )
        wrote = news.matters or self._due(known, now_ns)
        if wrote:
            with self._database.write() as session:
                self._fence(session, now_ns)
                keep(session, known, news, self._rules.receivers, now_ns)
            self._committed(job, news, now_ns)
        self._suspend(known, decision)
        return Looked(
            goes_on=job.state not in FINISHED,
            wrote=wrote,
            commanded=bool(decision.commands),
            behind=known.behind,
        )

    def _apply(
        self, job: models.Job, decision: Decision, now_ns: int, ended_ns: int
    ) -> Placement | None:
        """Move the job's row on; returns the placement of a new generation."""
        job.state = decision.state or job.state
        job.topology = decision.topology or job.topology
        if job.state in FINISHED:
            job.finished_ns = job.finished_ns or ended_ns
            job.ledger = self._engine.ledger(job.finished_ns)
        if decision.generation is None and decision.ranks is None:
            return None
        job.generation = job.generation if decision.generation is None else decision.generation
        views = decision.ranks or []
        return Placement(
            generation=job.generation,
            topology=job.topology,
            nodes={view.rank: view.agent_id for view in views},
            gpus={view.rank: view.gpu for view in views},
            metadata=job.spec.metadata,
            started_ns=now_ns,
        )

    def _due(self, known: Known, now_ns: int) -> bool:
        """Nothing of weight to keep, but it has been a while."""
        if now_ns - self._renewed_ns > self._rules.lease_ns // 3:
            return True
        waits = bool(known.log or self._ranks.changed())
        return waits and now_ns - self._kept_ns > _QUIET_NS

    def _ranks_wait(self, now_ns: int) -> bool:
        """Thousands of rows at each look would be most of the work."""
        pause_ns = len(self._ranks) * _RANK_PAUSE_NS
        return now_ns - self._ranks_kept_ns < pause_ns and not self._ranks.changed_life()

    def _memory_due(self, job: models.Job, now_ns: int) -> bool:
        """Not each time: it may be large, and what it lacks is in the log.

        Of a watched job that is over, another generation may follow at once.
        """
        return job.state in FINISHED or now_ns - self._remembered_ns > _MEMORY_NS

    def _committed(self, job: models.Job, news: News, now_ns: int) -> None:
        self._kept_ns = now_ns
        if news.memory is not None:
            self._remembered_ns = now_ns
        if news.placement is None:
            if not news.ranks_wait:
                self._ranks.committed()
                self._ranks_kept_ns = now_ns
            return
        with self._database.read() as session:
            self._ranks = Ranks(job.generation, queries.ranks(session, job.id))
        self._engine.place(news.placement)
        self._remembered_ns = 0

    def _suspend(self, known: Known, decision: Decision) -> None:
        """While the current generation is being ended its ranks' silence means nothing."""
        actions = {action.action_id: action for action in [*known.actions, *decision.actions]}
        ending = any(
            action.state == "running"
            and action.kind in ("restart", "stop")
            and action.generation == known.job.generation
            for action in actions.values()
        )
        if ending or known.job.state in FINISHED:
            self._engine.suspend()
        else:
            self._engine.resume()

    def _fence(self, session: Session, now_ns: int) -> None:
        mine = self._mine
        fence(session, mine.lease, mine.owner, mine.epoch, now_ns + self._rules.lease_ns)
        self._renewed_ns = now_ns

    def _renew(self) -> None:
        """During a long rebuild."""
        now_ns = self._clock()
        if now_ns - self._renewed_ns > self._rules.lease_ns // 3:
            with self._database.write() as session:
                self._fence(session, now_ns)

    def release(self) -> None:
        with self._database.write() as session:
            release(session, self._mine.lease, self._mine.owner, self._mine.epoch)


def _is_of(job: models.Job, event: wire.Event) -> bool:
    if isinstance(event, wire.RankAttached):
        return event.identity.job == job.id
    return getattr(event, "job", None) == job.id
