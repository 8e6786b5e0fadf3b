"""Follow the waits to the ranks that wait for no other rank.

A device runs operations in launch order, so a rank waits in the earliest of its unfinished
operations, and that operation waits for its targets (see `waiting`). In a correct program each wait
leads to an earlier position in the program, so the path ends at the ranks that caused all other
waits. Two cases need care.

Cycles: a sender rarely waits for its receiver, so a cycle is first opened at its sends. A cycle
that remains was launched in different orders on different ranks.

Two culprits, one of which also waits for the other: a rank that is behind a participant of the
operations it waits in is not blocked by them, because they did not block that participant. It is a
separate culprit. If one of several devices stopped, its rank is the culprit (`narrowed`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from paceline_server.flight_recorder.components import final_components
from paceline_server.flight_recorder.dump import Dump
from paceline_server.flight_recorder.operations import Operation
from paceline_server.flight_recorder.waiting import DumpWait, DumpWaitReason

# Order in which a rank's reasons are reported if others wait for it in several ways: closest to the
# cause first.
_PRECEDENCE = (
    DumpWaitReason.MISMATCH,
    DumpWaitReason.DEVICE,
    DumpWaitReason.HOST,
    DumpWaitReason.NO_DUMP,
    DumpWaitReason.BEHIND,
)
_KINDS = {
    DumpWaitReason.MISMATCH: "mismatch",
    DumpWaitReason.DEVICE: "device",
    DumpWaitReason.HOST: "host",
    DumpWaitReason.NO_DUMP: "host",
    DumpWaitReason.BEHIND: "device",
}


@dataclass(frozen=True, slots=True)
class DumpCulprit:
    """A rank that caused the waits of others, with the waits for it, oldest first."""

    rank: int
    kind: str  # "host", "device" or "mismatch"
    waits: tuple[DumpWait, ...]
    is_certain: bool


def narrowed(waits: Iterable[DumpWait]) -> list[DumpWait]:
    """Return the devices with an unfinished operation whose host stopped too.

    When a device fails, its host stops too, because its next call fails.
    """
    waits = list(waits)
    lagging = set(_independently_late(waits, _queues(waits)))
    return [
        replace(wait, targets=wait.targets & lagging, is_certain=True)
        if wait.reason is DumpWaitReason.DEVICE and not wait.is_certain and wait.targets & lagging
        else wait
        for wait in waits
    ]


def culprits_of(waits: Iterable[DumpWait], dumps: Mapping[int, Dump]) -> list[DumpCulprit]:
    """Return the culprits, sorted by rank; empty if no rank waits. `waits`: from `narrowed`."""
    waits = sorted(waits, key=lambda wait: wait.operation.launched_ns())
    queues = _queues(waits)
    lagging = set(_independently_late(waits, queues))
    queues |= {rank: [] for rank in lagging}
    current, ends = _follow(queues, lagging)
    while any(_open_at_sends(end, queues) for end in ends):
        current, ends = _follow(queues, lagging)
    found = [
        culprit
        for end in ends
        for culprit in (
            _in_circle(end, current, dumps) if len(end) > 1 else _alone(min(end), waits)
        )
    ]
    certain = [culprit for culprit in found if culprit.is_certain]
    return sorted(certain or found, key=lambda culprit: culprit.rank)


def _queues(waits: Iterable[DumpWait]) -> dict[int, list[DumpWait]]:
    """Return for each rank the waits it participates in, in its launch order."""
    queues: dict[int, list[DumpWait]] = defaultdict(list)
    for wait in waits:
        for rank in wait.operation.unfinished():
            queues[rank].append(wait)
    for rank, queue in queues.items():
        queue.sort(key=lambda wait: wait.operation.arrivals[rank].order)
    return queues


def _follow(
    queues: Mapping[int, list[DumpWait]], lagging: set[int]
) -> tuple[dict[int, DumpWait], list[frozenset[int]]]:
    """Return the current wait of each rank, and the final components (nodes as in `_edges`)."""
    current = {rank: queue[0] for rank, queue in queues.items() if queue}
    to_blame = {rank for rank, wait in current.items() if rank in wait.targets}
    current = {rank: wait for rank, wait in current.items() if rank not in to_blame}
    ends: dict[int, list[int]] = {rank: [] for rank in to_blame | lagging}
    return current, final_components(_edges(current) | ends)


def _edges(current: Mapping[int, DumpWait]) -> dict[int, list[int]]:
    """Return edges between ranks and waits; waits are negative nodes, which keeps groups cheap."""
    numbers = {id(wait): -1 - index for index, wait in enumerate(current.values())}
    edges = {rank: [numbers[id(wait)]] for rank, wait in current.items()}
    edges |= {numbers[id(wait)]: sorted(wait.targets) for wait in current.values()}
    return edges


def _independently_late(
    waits: Iterable[DumpWait], queues: Mapping[int, list[DumpWait]]
) -> Iterator[int]:
    """Return ranks that are independently behind, even if they also wait.

    At least one participant launched the operation that they missed after all operations they wait
    in.
    """
    launched = {rank: _orders(rank, queue) for rank, queue in queues.items()}

    @cache
    def caught_up(rank: int, other: int) -> float:
        """Return the position at which `other` had launched everything the rank waits in."""
        orders = launched.get(other, {})
        return max((orders.get(place, math.inf) for place in launched.get(rank, ())), default=-1)

    for wait in waits:
        if wait.reason is DumpWaitReason.HOST and not wait.operation.is_p2p:
            for rank in wait.targets:
                arrivals = wait.operation.arrivals.items()
                if any(pending.order > caught_up(rank, other) for other, pending in arrivals):
                    yield rank


def _orders(rank: int, queue: Iterable[DumpWait]) -> dict[Hashable, int]:
    """Return when the rank first launched each program position that it waits in."""
    orders: dict[Hashable, int] = {}
    for wait in queue:
        orders.setdefault(_program_place(wait.operation), wait.operation.arrivals[rank].order)
    return orders


def _program_place(operation: Operation) -> Hashable:
    """Return the program position: equal for all ranks in a collective.

    Matched with the peer in a message.
    """
    if not operation.is_p2p:
        return id(operation)
    distance = operation.members[1] - operation.members[0]
    description = operation.group.description
    return operation.sequence, description, operation.sends_only, distance


def _open_at_sends(circle: frozenset[int], queues: dict[int, list[DumpWait]]) -> bool:
    """Remove the sends that ranks of the cycle wait in; return whether there were any."""
    opened = False
    for rank in circle if len(circle) > 1 else ():
        if rank >= 0 and queues[rank][0].operation.sends_only:
            queues[rank] = [wait for wait in queues[rank] if not wait.operation.sends_only]
            opened = True
    return opened


def _alone(rank: int, waits: Iterable[DumpWait]) -> list[DumpCulprit]:
    pointing = [wait for wait in waits if rank in wait.targets]
    reason = min((wait.reason for wait in pointing), key=_PRECEDENCE.index)
    nearest = tuple(wait for wait in pointing if wait.reason is reason)
    return [DumpCulprit(rank, _KINDS[reason], nearest, any(wait.is_certain for wait in nearest))]


def _in_circle(
    circle: frozenset[int], current: Mapping[int, DumpWait], dumps: Mapping[int, Dump]
) -> list[DumpCulprit]:
    """Return ranks with a minority order, otherwise the smallest set that explains the cycle."""
    inside = list({id(current[rank]): current[rank] for rank in circle if rank >= 0}.values())
    blamed = sorted(inside, key=lambda wait: (wait.operation.is_p2p, len(wait.targets)))
    first = blamed[0]
    fewest = [w for w in blamed if len(w.targets) == len(first.targets)]
    ranks = _in_unusual_order(circle, inside, dumps)
    is_certain = bool(ranks)
    if not ranks:
        ranks = {rank for wait in fewest for rank in wait.targets if rank in circle}
        is_certain = len(fewest) == 1
    # Two ranks that wait to receive from each other: one of them stopped before its send.
    is_host = all(w.reason is DumpWaitReason.HOST and w.operation.is_p2p for w in inside)
    return [
        DumpCulprit(
            rank,
            "host" if is_host else "mismatch",
            tuple(wait for wait in inside if rank in wait.targets),
            is_certain,
        )
        for rank in ranks
    ]


def _in_unusual_order(
    circle: frozenset[int], inside: Iterable[DumpWait], dumps: Mapping[int, Dump]
) -> set[int]:
    """Return ranks of the cycle that launched two operations in the minority order.

    Ranks outside the cycle vote with operations of their own groups of the same purpose and
    number.
    """
    operations = [wait.operation for wait in inside if not wait.operation.is_p2p]
    voters = {rank for operation in operations for rank in operation.members if rank in dumps}
    outliers: set[int] = set()
    for one, another in combinations(operations, 2):
        places = (_place(one), _place(another))
        orders = {rank: _order(dumps[rank], places) for rank in voters}
        firsts = [order for order in orders.values() if order is not None]
        if 2 * sum(firsts) != len(firsts):
            usual = 2 * sum(firsts) > len(firsts)
            outliers |= {r for r, order in orders.items() if r in circle and order is (not usual)}
    return outliers


def _place(operation: Operation) -> tuple[str, int]:
    return operation.group.description, operation.sequence


def _order(dump: Dump, places: tuple[tuple[str, int], tuple[str, int]]) -> bool | None:
    """Return whether the first position was launched before the second.

    None if either was not launched.
    """
    found = {
        place: entry.order
        for entry in dump.entries
        if not entry.is_p2p and (place := (entry.description, entry.sequence)) in places
    }
    return found[places[0]] < found[places[1]] if len(found) == 2 else None
