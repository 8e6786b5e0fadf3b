"""Measure the steps of a running generation again, from stored batches."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.engine.clocks import NodeClocks
from paceline_server.engine.definitions import Definitions
from paceline_server.engine.types import Placement
from paceline_server.steps.model import StepModel
from paceline_server.steps.timing import StepTiming
from paceline_wire.batch import Batch, RankAttached, RankDefined


def remeasure(
    job: str,
    placement: Placement,
    batches: Iterable[tuple[Batch, int]],
    definitions: Definitions | None = None,
) -> list[StepTiming]:
    """Return every step that ends in `batches`.

    Args:
        job: its id.
        placement: of the generation.
        batches: ordered pairs of a batch and the time it was received.
        definitions: what the ranks defined before the first of these batches.
    """
    model = StepModel(placement.generation, placement.topology, placement.metadata)
    clocks = NodeClocks()
    if definitions is not None and definitions.are_of(placement):
        model.describe(definitions.metadata)
        for event in definitions.events(job, placement):
            model.define(event)
    for batch, received_ns in batches:
        clocks.add_batch(batch.agent_id, batch.packed_ns, received_ns)
        _define(model, job, placement, batch)
        for block in batch.spans:
            holder = placement.nodes.get(block.rank, batch.agent_id)
            generation = placement.reported_generation(block.rank)
            is_ours = (block.job, block.generation) == (job, generation)
            if is_ours and holder == batch.agent_id:
                try:
                    model.add(block, clocks.shift_ns(batch.agent_id))
                except ValueError:  # counted when the batch was first read
                    continue
    return [finished.timing for finished in model.take_finished()]


def _define(model: StepModel, job: str, placement: Placement, batch: Batch) -> None:
    generation = placement.reported_generation
    for event in batch.events:
        match event:
            case RankDefined() if (event.job, event.generation) == (job, generation(event.rank)):
                model.define(event)
            case RankAttached(identity=identity):
                if (identity.job, identity.generation) == (job, generation(identity.rank)):
                    model.describe(identity.metadata)
            case _:
                pass
