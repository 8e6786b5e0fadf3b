"""Stage 3 of a tick: run the detectors, and bring the job's columns up to date."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from paceline_server.decide.types import Acknowledged, Experience, FailureHistory
from paceline_server.engine.types import Outcome
from paceline_server.worker.acknowledgements import checkpoint_step, merge
from paceline_server.worker.feed import Fed
from paceline_server.worker.memory import JobMemory
from paceline_server.worker.snapshot import JobColumns, Snapshot
from paceline_wire.topology import Topology


@dataclass(frozen=True, slots=True)
class Detected:
    outcome: Outcome | None  # None: the warm-up is not over, so nothing can be concluded
    columns: JobColumns  # with the progress of the ranks
    acknowledged: tuple[Acknowledged, ...]  # the stored and the new ones


def detect(memory: JobMemory, snapshot: Snapshot, fed: Fed, now_ns: int) -> Detected:
    as_of_ns = _as_of_ns(snapshot, now_ns)
    outcome = _conclude(memory, snapshot, now_ns, as_of_ns)
    acknowledged = merge(snapshot.acknowledged, snapshot.new_acknowledged)
    before = snapshot.columns
    spec = replace_fields(before.spec, metadata=dict(fed.metadata))
    columns = replace(before, spec=spec, cursor=fed.cursor)
    if outcome is not None:
        saved = checkpoint_step(acknowledged, before.topology.world_size)
        columns = _progress(
            columns,
            outcome,
            saved,
            memory.evaluation_loss,
            as_of_ns,
            len(memory.ranks.agents),
            snapshot.fleet,
        )
    return Detected(outcome, columns, tuple(acknowledged))


def _as_of_ns(snapshot: Snapshot, now_ns: int) -> int:
    """Return the time up to which the log has been read.

    While part of the log is unread, a node that seems silent may have batches in that part.
    """
    return min(now_ns, snapshot.log[-1].received_ns) if snapshot.behind else now_ns


def _conclude(memory: JobMemory, snapshot: Snapshot, now_ns: int, as_of_ns: int) -> Outcome | None:
    own = memory.ranks.agents
    if not memory.warm_up.is_done(own, now_ns):
        return None
    others = (node.last_seen_ns for node in snapshot.nodes if node.agent_id not in own)
    outcome = memory.engine.tick(as_of_ns, max(others, default=0))
    outcome.steps[:0] = memory.rebuilt.steps
    outcome.findings[:0] = memory.rebuilt.findings
    memory.rebuilt = Outcome()
    memory.ranks.update_progress(outcome.progress)
    return outcome


def _relocated(before: JobColumns, topology: Topology) -> JobColumns:
    """Return the columns with the topology that the ranks report; a restart asks for the same."""
    spec = before.spec
    if spec.topology == before.topology != topology:
        spec = replace_fields(spec, topology=topology)
    return replace(before, spec=spec, topology=topology)


def _experience(
    before: Experience, outcome: Outcome, nodes: int, fleet: FailureHistory | None
) -> Experience:
    interval, seconds = outcome.checkpoint_interval_steps, outcome.checkpoint_seconds
    saving = outcome.checkpoint_saving_steps
    return replace_fields(
        before,
        checkpoint_interval_steps=(
            before.checkpoint_interval_steps if interval is None else interval
        ),
        checkpoint_seconds=before.checkpoint_seconds if seconds is None else seconds,
        checkpoint_saving_steps=before.checkpoint_saving_steps if saving is None else saving,
        nodes=nodes,
        fleet=before.fleet if fleet is None else fleet,
    )


def _progress(
    before: JobColumns,
    outcome: Outcome,
    saved: int | None,
    evaluation_loss: float | None,
    as_of_ns: int,
    nodes: int,
    fleet: FailureHistory | None,
) -> JobColumns:
    started_ns, step, loss = before.started_ns, before.step, before.loss
    if outcome.placement is not None:
        before = _relocated(before, outcome.placement.topology)
    for summary in outcome.steps:
        started_ns = started_ns or summary.started_ns
        step = summary.step
        loss = loss if summary.loss is None else summary.loss
    finished = [summary.step for summary in outcome.steps]
    reached = [before.highest_step, outcome.highest_step, *finished]
    # The ranks know which checkpoint they resumed from, even if a newer one was damaged.
    checkpoint = before.checkpoint_step if outcome.saved_step is None else outcome.saved_step
    if saved is not None:
        checkpoint = max(saved, checkpoint or 0)
    return replace(
        before,
        ticked_ns=as_of_ns,
        ledger=outcome.ledger,
        evaluation_loss=evaluation_loss,
        step_seconds=before.step_seconds if outcome.step_seconds is None else outcome.step_seconds,
        checkpoint_step=checkpoint,
        experience=_experience(before.experience, outcome, nodes, fleet),
        can_checkpoint=(
            before.can_checkpoint if outcome.can_checkpoint is None else outcome.can_checkpoint
        ),
        started_ns=started_ns,
        step=step,
        loss=loss,
        highest_step=max((step for step in reached if step is not None), default=None),
    )
