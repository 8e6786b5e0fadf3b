"""An engine as it was at the cursor, from what it must not forget and the log that is kept.

What the engine says meanwhile was acted upon before, with two exceptions that are handed back:
steps that no row holds yet, and findings of the current generation that were not cleared. (Ticks
fall on other moments than they once did, so an engine may say something a little earlier now.)
`decide` knows findings again by their fingerprint, and the ledger books no step twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from paceline_server.detect.finding import Finding
from paceline_server.detect.settings import DetectionSettings
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome
from paceline_server.steps.types import StepSummary
from paceline_server.store.database import Database
from paceline_server.store.log import read_log
from paceline_server.store.models import EngineMemory, Generation, HotLog, Job, Step
from paceline_server.worker.earlier_processes import Strangers
from paceline_wire import batch as wire

_CHUNK = 200
_TICK_NS = 200_000_000


@dataclass
class Rebuilt:
    engine: Engine
    steps: list[StepSummary] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        self.steps += outcome.steps
        for finding in outcome.findings:
            if finding.cleared:
                self.findings.pop(finding.fingerprint, None)
            else:
                self.findings[finding.fingerprint] = finding


def rebuild(
    database: Database, job: Job, strangers: Strangers, keep_alive: Callable[[], None]
) -> Rebuilt:
    """`keep_alive` is called now and then, to renew the lease."""
    with database.read() as session:
        kept = session.get(EngineMemory, job.id)
        generations = _last_generations(session, job.id)
        newest = _newest_steps(session, job.id)
    rebuilt = Rebuilt(Engine(job.id, _settings(job), None if kept is None else kept.memory))
    if not generations:
        return rebuilt
    _replay(database, job, generations, rebuilt, strangers, keep_alive)
    if job.ticked_ns is not None:
        rebuilt.take(rebuilt.engine.tick(job.ticked_ns))
    rebuilt.steps = [each for each in rebuilt.steps if each.step > newest.get(each.generation, -1)]
    rebuilt.findings = {
        fingerprint: finding
        for fingerprint, finding in rebuilt.findings.items()
        if finding.generation == job.generation
    }
    return rebuilt


def _settings(job: Job) -> DetectionSettings:
    return DetectionSettings(
        node_lease_seconds=job.policy.node_lease_seconds,
        hang_startup_seconds=job.policy.start_timeout_seconds,
    )


def _replay(
    database: Database,
    job: Job,
    generations: list[Generation],
    rebuilt: Rebuilt,
    strangers: Strangers,
    keep_alive: Callable[[], None],
) -> None:
    position = generations[0].cursor
    waiting = list(generations)
    ticked_ns = 0
    while position < job.cursor:
        with database.read() as session:
            entries = [row for row in read_log(session, position, _CHUNK) if row.id <= job.cursor]
        if not entries:
            break
        for entry in entries:
            _place(rebuilt.engine, waiting, entry.id - 1)
            if entry.received_ns - ticked_ns >= _TICK_NS:
                ticked_ns = entry.received_ns
                rebuilt.take(rebuilt.engine.tick(ticked_ns))
            _feed(rebuilt.engine, entry, strangers)
        position = entries[-1].id
        keep_alive()
    _place(rebuilt.engine, waiting, job.cursor)


def _place(engine: Engine, waiting: list[Generation], position: int) -> None:
    """Begin the generations that were placed when the log had been read up to `position`."""
    while waiting and waiting[0].cursor <= position:
        engine.place(waiting.pop(0).placement)


def _feed(engine: Engine, entry: HotLog, strangers: Strangers) -> None:
    """What it could not take then, it cannot take now."""
    try:
        engine.feed(strangers.left_out(wire.decode(entry.payload)), entry.received_ns)
    except Exception:  # counted when it was first read
        return


def _last_generations(session: Session, job_id: str) -> list[Generation]:
    """In order. Two, for the memory may be from before the last one was placed."""
    query = select(Generation).where(Generation.job_id == job_id)
    newest = session.scalars(query.order_by(Generation.generation.desc()).limit(2)).all()
    return list(reversed(newest))


def _newest_steps(session: Session, job_id: str) -> dict[int, int]:
    query = (
        select(Step.generation, func.max(Step.step))
        .where(Step.job_id == job_id)
        .group_by(Step.generation)
    )
    return dict(session.execute(query).all())
