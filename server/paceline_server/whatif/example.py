"""One pipeline of a running job as an example of all: its operations and their order.

The example is the most complete pipeline (one dp and tp rank in one step). A missing compute
operation is taken from the next best pipelines, where it followed the same operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from paceline_server.whatif.columns import Layout, StepColumns
from paceline_server.whatif.order import Computed, Order, Transferred, learn

# A pipeline with this many times more operations than most is an outlier, not an example.
OUTLIER_RATIO = 1.1

# Number of other pipelines that are searched for missing operations.
DONORS = 8

_NAMES = ("op", "chunk", "microbatch")


def learn_order(compute: StepColumns, transfers: StepColumns, layout: Layout) -> Order | None:
    """Return the order; None if no pipeline has records of each stage.

    Microbatches without numbers are counted in both tables.
    """
    cells, stages = compute.cells, layout.topology.pp
    by_stage = np.bincount(compute.cell * stages + compute["stage"], minlength=cells * stages)
    by_stage = by_stage.reshape(cells, stages)
    whole = by_stage.all(axis=1)
    if not whole.any():
        return None
    seen = by_stage.sum(axis=1) + np.bincount(transfers.cell, minlength=cells)
    seen[~whole | (seen > OUTLIER_RATIO * np.median(seen[whole]))] = 0
    best, *others = (int(cell) for cell in np.argsort(-seen, kind="stable")[: 1 + DONORS])
    if not compute.rows(best).are_named("stage", *_NAMES):
        compute.number("start_ns", "stage", "op", "chunk")
        transfers.number("send_start_ns", "source", "target", "op", "chunk")
    chains = _chains(compute, best, stages)
    # The others are not completed: they differ only in what was lost.
    for donor in others if compute.cells > 1 else ():
        if seen[donor]:
            donated = _chains(compute, donor, stages)
            chains = [
                _completed(mine, theirs) for mine, theirs in zip(chains, donated, strict=True)
            ]
    moments = ("send_start_ns", "send_end_ns", "receive_start_ns", "end_ns")
    transferred = transfers.rows(best).tuples("source", "target", *_NAMES, *moments)
    return learn(chains, [Transferred(*row) for row in transferred])


def _chains(compute: StepColumns, cell: int, stages: int) -> list[list[Computed]]:
    """Return the compute operations by stage, in recorded order."""
    rows = compute.rows(cell).tuples("stage", *_NAMES, "start_ns", "end_ns")
    chains: list[list[Computed]] = [[] for _ in range(stages)]
    for one in sorted((Computed(*row) for row in rows), key=lambda one: one.start_ns):
        chains[one.stage].append(one)
    return chains


def _completed(chain: Sequence[Computed], donated: Sequence[Computed]) -> list[Computed]:
    """Return `chain` with the operations that only the other one has, each after its predecessor.

    Clocks are not compared: an inserted operation takes all the time until the next operation,
    because its end is unknown.
    """
    known = {one.key for one in chain}
    if all(one.key in known for one in donated):
        return list(chain)
    followers: dict[tuple[int, ...] | None, list[Computed]] = {}
    before = None
    for one in donated:
        if one.key in known:
            before = one.key
        else:
            followers.setdefault(before, []).append(one)
    first_ns = chain[0].start_ns
    result = [one._replace(start_ns=first_ns, end_ns=first_ns) for one in followers.get(None, ())]
    for mine, following in zip_longest(chain, chain[1:]):
        result.append(mine)
        for one in followers.get(mine.key, ()):
            lasts_ns = one.end_ns - one.start_ns
            end_ns = mine.end_ns + lasts_ns if following is None else following.start_ns
            result.append(one._replace(start_ns=mine.end_ns, end_ns=end_ns))
    return result
