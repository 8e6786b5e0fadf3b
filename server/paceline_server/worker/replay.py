"""Rebuild a job's engine as of the cursor, from its stored memory and the log.

The engine's outcomes during the rebuild were already processed, with two exceptions that are
returned: steps that are not stored yet, and findings of the current generation that were not
cleared. (The ticks of the rebuild are at other times than the original ones, so a finding may come
slightly earlier.) `decide` recognizes findings by their fingerprint, and the ledger does not count
a step twice.

Of the generation before the current one only the end is read again, from a minute before the stored
memory: a restart of an hour's training needs no rebuild of that hour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome
from paceline_server.steps.types import StepSummary
from paceline_server.store.database import Database
from paceline_server.store.log import position_at, read_log, received_until
from paceline_server.store.models import EngineMemoryRow, GenerationRow, HotLogRow, JobRow, StepRow
from paceline_server.worker.earlier_processes import EarlierProcesses
from paceline_wire import batch as wire

_CHUNK = 200
_TICK_NS = 200_000_000
_BEFORE_MEMORY_NS = 60_000_000_000  # whole steps, also of slow ranks


@dataclass
class Rebuilt:
    engine: Engine
    steps: list[StepSummary] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.steps += outcome.steps
        for finding in outcome.findings:
            if finding.cleared:
                self.findings.pop(finding.fingerprint, None)
            else:
                self.findings[finding.fingerprint] = finding


def rebuild(
    database: Database,
    job: JobRow,
    earlier_processes: EarlierProcesses,
    keep_alive: Callable[[], None],
) -> Rebuilt:
    """Rebuild the engine; `keep_alive` is called regularly to renew the lease."""
    with database.read() as session:
        row = session.get(EngineMemoryRow, job.id)
        generations = _last_generations(session, job.id)
        newest = _newest_steps(session, job.id)
        begin = _begin(session, generations, 0 if row is None else row.cursor)
    rebuilt = Rebuilt(Engine(job.id, job.policy, None if row is None else row.memory))
    if not generations:
        return rebuilt
    _replay(database, job, generations, begin, rebuilt, earlier_processes, keep_alive)
    if job.ticked_ns is not None:
        rebuilt.add(rebuilt.engine.tick(job.ticked_ns))
    rebuilt.steps = [
        summary for summary in rebuilt.steps if summary.step > newest.get(summary.generation, -1)
    ]
    rebuilt.findings = {
        fingerprint: finding
        for fingerprint, finding in rebuilt.findings.items()
        if finding.generation == job.generation
    }
    return rebuilt


def _replay(
    database: Database,
    job: JobRow,
    generations: list[GenerationRow],
    begin: int,
    rebuilt: Rebuilt,
    earlier_processes: EarlierProcesses,
    keep_alive: Callable[[], None],
) -> None:
    position = begin
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
                rebuilt.add(rebuilt.engine.tick(ticked_ns))
            _feed(rebuilt.engine, entry, earlier_processes)
        position = entries[-1].id
        keep_alive()
    _place(rebuilt.engine, waiting, job.cursor)


def _place(engine: Engine, waiting: list[GenerationRow], position: int) -> None:
    """Begin the generations that were placed once the log had been read up to `position`.

    A run that was started outside Paceline is read from a second before its start, and the run
    before it may have lasted less.
    """
    while any(each.cursor <= position for each in waiting):
        engine.place(waiting.pop(0).placement)


def _feed(engine: Engine, entry: HotLogRow, earlier_processes: EarlierProcesses) -> None:
    try:
        engine.feed(earlier_processes.filter(wire.decode(entry.payload)), entry.received_ns)
    except Exception:  # the same failure was counted when the batch was first read
        return


def _last_generations(session: Session, job_id: str) -> list[GenerationRow]:
    """Return the last two in order, because the stored memory may be older than the last one."""
    query = select(GenerationRow).where(GenerationRow.job_id == job_id)
    newest = session.scalars(query.order_by(GenerationRow.generation.desc()).limit(2)).all()
    return list(reversed(newest))


def _begin(session: Session, generations: list[GenerationRow], remembered: int) -> int:
    """Return the position from which the log is read again.

    `remembered`: last position that the stored memory includes; 0 without a memory.
    """
    if not generations:
        return 0
    first, last = generations[0].cursor, generations[-1].cursor
    needed = position_at(session, received_until(session, remembered) - _BEFORE_MEMORY_NS)
    return min(last, max(first, needed))


def _newest_steps(session: Session, job_id: str) -> dict[int, int]:
    query = (
        select(StepRow.generation, func.max(StepRow.step))
        .where(StepRow.job_id == job_id)
        .group_by(StepRow.generation)
    )
    return dict(session.execute(query).all())
