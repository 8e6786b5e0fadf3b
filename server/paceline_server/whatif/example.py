"""The order of operations of a running job, derived from one example pipeline.

The example is the pipeline with the most records (one dp and tp rank in one step). Its missing
compute operations are taken from other pipelines and inserted after the operation that they follow
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from paceline_server.medians import median
from paceline_server.whatif.columns import Layout, StepColumns
from paceline_server.whatif.order import Computed, Order, Transferred, learn

# A pipeline with this many times the median number of operations is an outlier, not an example.
OUTLIER_RATIO = 1.1

# Number of other pipelines that are searched for missing operations.
DONORS = 8

_NAMES = ("op", "chunk", "microbatch")


def learn_order(compute: StepColumns, transfers: StepColumns, layout: Layout) -> Order | None:
    """Return the order; None if no pipeline has records of each stage.

    Microbatches without a number are numbered in order, in both tables.
    """
    cells, stages = compute.cells, layout.topology.pp
    by_stage = np.bincount(compute.cell * stages + compute["stage"], minlength=cells * stages)
    by_stage = by_stage.reshape(cells, stages)
    whole = by_stage.all(axis=1)
    if not whole.any():
        return None
    seen = by_stage.sum(axis=1) + np.bincount(transfers.cell, minlength=cells)
    seen[~whole | (seen > OUTLIER_RATIO * median(seen[whole]))] = 0
    best, *others = (int(cell) for cell in np.argsort(-seen, kind="stable")[: 1 + DONORS])
    if not compute.rows(best).are_named("stage", *_NAMES):
        compute.number("start_ns", "stage", "op", "chunk")
        transfers.number("send_start_ns", "source", "target", "op", "chunk")
    chains = _chains(compute, best, stages)
    # Donors are used as recorded: pipelines differ only in which records are missing.
    for donor in others if compute.cells > 1 else ():
        if seen[donor]:
            donated = _chains(compute, donor, stages)
            chains = [
                _completed(chain, donor_chain)
                for chain, donor_chain in zip(chains, donated, strict=True)
            ]
    moments = ("send_start_ns", "send_end_ns", "receive_start_ns", "end_ns")
    transferred = transfers.rows(best).tuples("source", "target", *_NAMES, *moments)
    return learn(chains, [Transferred(*row) for row in transferred])


def _chains(compute: StepColumns, cell: int, stages: int) -> list[list[Computed]]:
    """Return the compute operations by stage, in recorded order."""
    rows = compute.rows(cell).tuples("stage", *_NAMES, "start_ns", "end_ns")
    chains: list[list[Computed]] = [[] for _ in range(stages)]
    operations = (Computed(*row) for row in rows)
    for operation in sorted(operations, key=lambda operation: operation.start_ns):
        chains[operation.stage].append(operation)
    return chains


def _completed(chain: Sequence[Computed], donated: Sequence[Computed]) -> list[Computed]:
    """Return `chain` with the operations that only `donated` has, each inserted after its
    predecessor.

    Clocks of different ranks are not compared, so the end of an inserted operation is unknown and
    assumed to be the start of the next one.
    """
    known = {operation.key for operation in chain}
    if all(operation.key in known for operation in donated):
        return list(chain)
    missing_after: dict[tuple[int, ...] | None, list[Computed]] = {}
    predecessor = None
    for operation in donated:
        if operation.key in known:
            predecessor = operation.key
        else:
            missing_after.setdefault(predecessor, []).append(operation)
    first_ns = chain[0].start_ns
    result = [
        operation._replace(start_ns=first_ns, end_ns=first_ns)
        for operation in missing_after.get(None, ())
    ]
    for recorded, following in zip_longest(chain, chain[1:]):
        result.append(recorded)
        for operation in missing_after.get(recorded.key, ()):
            duration_ns = operation.end_ns - operation.start_ns
            end_ns = recorded.end_ns + duration_ns if following is None else following.start_ns
            result.append(operation._replace(start_ns=recorded.end_ns, end_ns=end_ns))
    return result
