"""Steps of a running generation measured again, from batches that were kept."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.engine.clocks import NodeClocks
from paceline_server.engine.types import Placement
from paceline_server.steps.model import StepModel
from paceline_server.steps.timing import StepTiming
from paceline_wire.batch import Batch, RankAttached, RankDefined
from paceline_wire.ring import GroupDefinition


def recall(
    job: str, placement: Placement, batches: Iterable[tuple[Batch, int]]
) -> list[StepTiming]:
    """Every step of which the end is there; `batches` with when each was received, in order."""
    model = StepModel(placement.generation, placement.topology, placement.metadata)
    clocks = NodeClocks()
    for batch, received_ns in batches:
        clocks.see(batch.agent_id, batch.packed_ns, received_ns)
        _define(model, job, placement, batch)
        for block in batch.spans:
            holder = placement.nodes.get(block.rank, batch.agent_id)
            ours = (block.job, block.generation) == (job, placement.said_by(block.rank))
            if ours and holder == batch.agent_id:
                try:
                    model.add(block, clocks.shift_ns(batch.agent_id))
                except ValueError:  # counted when it was first read
                    continue
    return [finished.timing for finished in model.take_finished()]


def _define(model: StepModel, job: str, placement: Placement, batch: Batch) -> None:
    said_by = placement.said_by
    for event in batch.events:
        match event:
            case RankDefined() if (event.job, event.generation) == (job, said_by(event.rank)):
                for definition in event.definitions:
                    if isinstance(definition, GroupDefinition):
                        model.add_group(event.rank, definition)
            case RankAttached(identity=identity):
                if (identity.job, identity.generation) == (job, said_by(identity.rank)):
                    model.describe(identity.metadata)
            case _:
                pass
