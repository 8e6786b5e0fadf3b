"""Stage 2 of a tick: pass the new batches to the engine, the ranks and the warm-up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from paceline_server.metrics import BackgroundMetrics
from paceline_server.steps.metadata import merged
from paceline_server.worker.memory import JobMemory
from paceline_server.worker.snapshot import Snapshot
from paceline_wire.batch import Batch, Event, RankAttached, RankDefined, RankState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fed:
    cursor: int  # id of the last log entry that was fed
    metadata: Mapping[str, str]  # metadata of the job, including what newly attached ranks reported


def feed(memory: JobMemory, snapshot: Snapshot, metrics: BackgroundMetrics) -> Fed:
    metadata: Mapping[str, str] = snapshot.columns.spec.metadata
    memory.engine.use_policy(snapshot.policy)
    for received in snapshot.log:
        memory.cursor = received.log_id
        batch = memory.earlier_processes.filter(received.batch)
        memory.warm_up.receive(batch, received.received_ns)
        try:
            memory.engine.feed(batch, received.received_ns)
        except Exception:
            # A malformed batch of one agent must not stop the detection for the whole job.
            metrics.batches_skipped.inc()
            _log.exception("batch %d of %s skipped", received.log_id, batch.agent_id)
        metadata = _apply_events(memory, snapshot.job_id, batch, metadata)
    return Fed(memory.cursor, metadata)


def _apply_events(
    memory: JobMemory, job_id: str, batch: Batch, metadata: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the metadata with what the ranks reported."""
    if batch.agent_id not in memory.ranks.agents:  # any user of a node can claim a job's name
        return metadata
    for event in batch.events:
        if not _is_of(job_id, event):
            continue
        if isinstance(event, RankState):  # the most numerous by far
            if event.view.evaluation_loss is not None:
                memory.evaluation_loss = event.view.evaluation_loss
            continue
        memory.ranks.apply(batch.agent_id, event)
        if isinstance(event, RankAttached):
            metadata = merged(metadata, event.identity.metadata)
        elif isinstance(event, RankDefined):
            for description in event.descriptions:
                metadata = merged(metadata, description.metadata)
    return metadata


def _is_of(job_id: str, event: Event) -> bool:
    if isinstance(event, RankAttached):
        return event.identity.job == job_id
    return getattr(event, "job", None) == job_id
