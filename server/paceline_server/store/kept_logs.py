"""The batches of the last steps of jobs that have ended, kept after the hot log is pruned.

So a job that ended in the night can still be analyzed, and its trace exported, in the morning.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from paceline_server.store import queries
from paceline_server.store.log import position_at
from paceline_server.store.models import GenerationRow, HotLogRow, KeptLogRow

# With clock skew, a step's first spans may arrive before its start on the server's clock.
MARGIN_NS = 5_000_000_000
# The last eight steps are kept, because an analysis takes eight by default. If they are larger than
# MOST_BYTES, the last three are kept, which is the least that it needs; else none.
_STEPS = (8, 3)
MOST_BYTES = 32 << 20

_Batches = list[tuple[int, bytes]]  # (when it was received, compressed batch), in order
_decoder = msgspec.msgpack.Decoder(_Batches)


def keep_last_steps(session: Session, job_id: str, generation: int, now_ns: int) -> None:
    """Copy the batches with the last steps of a job that ends now from the hot log."""
    session.execute(delete(KeptLogRow).where(KeptLogRow.job_id == job_id))
    row = session.get(GenerationRow, (job_id, generation))
    newest = queries.steps(session, job_id, None, _STEPS[0], generation)
    if row is None or not newest:
        return
    nodes = set(row.placement.nodes.values())
    for count in _STEPS:
        since_ns = min(step.summary.started_ns for step in newest[-count:]) - MARGIN_NS
        begin = max(position_at(session, since_ns), row.cursor)
        size, entries = session.execute(
            select(func.sum(HotLogRow.size_bytes), func.count()).where(
                HotLogRow.id > begin, HotLogRow.agent_id.in_(nodes)
            )
        ).one()
        if entries and size <= MOST_BYTES:
            query = (
                select(HotLogRow.received_ns, HotLogRow.payload)
                .where(HotLogRow.id > begin, HotLogRow.agent_id.in_(nodes))
                .order_by(HotLogRow.id)
            )
            batches: _Batches = [(at_ns, payload) for at_ns, payload in session.execute(query)]
            session.add(
                KeptLogRow(
                    job_id=job_id,
                    generation=generation,
                    kept_ns=now_ns,
                    size_bytes=int(size),
                    batches=msgspec.msgpack.encode(batches),
                )
            )
            return


def kept_batches(session: Session, job_id: str, generation: int) -> _Batches:
    """Return the batches that were kept from a job's last generation, if there are any."""
    row = session.get(KeptLogRow, job_id)
    if row is None or row.generation != generation:
        return []
    return _decoder.decode(row.batches)


def prune_kept_logs(session: Session, most_bytes: int) -> None:
    """Delete the oldest, so that the others take at most `most_bytes`."""
    row, total = KeptLogRow, 0
    for job_id, size in session.execute(
        select(row.job_id, row.size_bytes).order_by(row.kept_ns.desc(), row.job_id)
    ).all():
        total += size
        if total > most_bytes:
            session.execute(delete(row).where(row.job_id == job_id))
