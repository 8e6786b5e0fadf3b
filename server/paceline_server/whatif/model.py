"""The dependency model of a step, arranged in levels for the replay.

Operations that start together form a node. The level of a node is one more than the highest level
of the nodes it waits for, so the replay can compute all nodes of a level at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.whatif import operations as ops
from paceline_server.whatif.dependencies import Dependencies
from paceline_server.whatif.errors import TraceError

Indexes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ReplayBlock:
    """Nodes of one level. Either all or none of them are synchronized across data-parallel ranks.

    The operations of the block are at positions `first:stop` in the model's order. Nodes are sorted
    by descending number of predecessors. `waits[k]` holds the k-th predecessor of the nodes that
    have more than k predecessors.
    """

    first: int
    stop: int
    nodes: int
    members: Indexes | None  # node of each operation; None: one operation per node
    waits: tuple[Indexes, ...]
    synchronized: bool


@dataclass(frozen=True, slots=True)
class Model:
    """A step in replay order: `order[position]` is the operation.

    All other fields hold positions.
    """

    order: Indexes
    blocks: tuple[ReplayBlock, ...]
    last: Indexes  # operations without successors; the step ends with one of them
    pairs: npt.NDArray[np.intp]  # [pair, 2]: a send and its receive
    larger_groups: tuple[Indexes, ...]


def lay_out(
    dependencies: Dependencies,
    optype: Sequence[str],
    synchronized_optypes: Set[str] = ops.SYNCHRONIZED,
) -> Model:
    """Arrange the operations in levels.

    Args:
        optype: the type of each operation.
        synchronized_optypes: types that wait for the same operation of every data-parallel rank.
    Raises:
        TraceError: operations wait for each other in a cycle.
    """
    groups = dependencies.groups
    node_of = [0] * len(optype)
    for node, group in enumerate(groups):
        for op in group:
            node_of[op] = node
    waits = [
        sorted({before for op in group for before in dependencies.predecessors[op]})
        for group in groups
    ]
    levels = _levels([{node_of[op] for op in before} for before in waits], groups, optype)
    synchronized = [optype[group[0]] in synchronized_optypes for group in groups]
    nodes = sorted(
        range(len(groups)),
        key=lambda node: (levels[node], synchronized[node], -len(waits[node])),
    )
    order = [op for node in nodes for op in groups[node]]
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    blocks = []
    first = 0
    for run in _runs(nodes, [(levels[node], synchronized[node]) for node in nodes]):
        sizes = [len(groups[node]) for node in run]
        members = None
        if max(sizes) > 1:
            members = np.repeat(np.arange(len(run)), sizes)
        depth = len(waits[run[0]])
        columns = tuple(
            place[[waits[node][at] for node in run if at < len(waits[node])]] for at in range(depth)
        )
        stop = first + sum(sizes)
        blocks.append(ReplayBlock(first, stop, len(run), members, columns, synchronized[run[0]]))
        first = stop
    waited_for = {op for before in waits for op in before}
    last = [op for op in range(len(optype)) if op not in waited_for]
    pairs = [group for group in groups if len(group) == 2]
    return Model(
        np.array(order, np.intp),
        tuple(blocks),
        place[last],
        place[np.array(pairs, np.intp).reshape(-1, 2)],
        tuple(place[group] for group in groups if len(group) > 2),
    )


def _levels(
    waits: Sequence[set[int]], groups: Sequence[Sequence[int]], optype: Sequence[str]
) -> list[int]:
    levels = [0] * len(waits)
    missing = [len(before) for before in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for node, before in enumerate(waits):
        for other in before:
            followers[other].append(node)
    ready = [node for node, count in enumerate(missing) if not count]
    for node in ready:  # grows during the iteration
        for follower in followers[node]:
            levels[follower] = max(levels[follower], levels[node] + 1)
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ready) < len(waits):
        stuck = sorted({optype[groups[node][0]] for node, count in enumerate(missing) if count})
        raise TraceError(
            "the recorded order is impossible, because operations wait for each other in a cycle: "
            f"{', '.join(stuck)}"
        )
    return levels


def _runs(nodes: Sequence[int], keys: Sequence[tuple[int, bool]]) -> list[list[int]]:
    runs: list[list[int]] = []
    for index, node in enumerate(nodes):
        if index and keys[index] == keys[index - 1]:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
