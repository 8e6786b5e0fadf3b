"""Step 2 of a hang verdict: find the culprits, which block others and do not wait for any other
rank.

Ranks that wait for each other in a cycle entered their communications in different orders. The
culprit is the one that left its own program, or whose counts differ from those of the ranks at the
same operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline_server.detect.finding import Side
from paceline_server.detect.hang.step_program import (
    ProgramChannel,
    RankProgram,
    communications_outside,
    departures_from,
    entered_counts,
)
from paceline_server.detect.hang.wait_for_graph import (
    BlockedOperation,
    BlockReason,
    Graph,
    Programs,
    blocked_operations,
    communication_frames,
    innermost_op,
    wait_for_graph,
)
from paceline_server.flight_recorder.components import final_components
from paceline_server.steps.groups import Groups
from paceline_wire.ring import StateView
from paceline_wire.spans import COMPUTE_OPS, Op

# Operations in which a host waits for its device, if communications are launched asynchronously.
_SYNCHRONIZING_OPS = COMPUTE_OPS | {Op.STEP, Op.OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Culprits:
    """The ranks that block a hung job.

    Attributes:
        side: Where they are stuck: host, device, or in mismatched communications.
        ranks: The one that most ranks wait for first. Empty: no rank in particular.
        operations: The blocked operations that wait for the culprits; if all members launched the
            communication, the operations in it.
        dependents: All ranks that wait for a culprit, directly or through others.
        departures: For each culprit that left its program: channel -> surplus of communications.
        cycle: The ranks that wait for each other.
    """

    side: Side
    ranks: tuple[int, ...]
    operations: tuple[BlockedOperation, ...]
    dependents: frozenset[int]
    departures: Mapping[int, Mapping[ProgramChannel, int]]
    cycle: frozenset[int] = frozenset()


Dependents = Mapping[frozenset[int], frozenset[int]]  # final component -> ranks that wait for it
Difference = Callable[[RankProgram, int, StateView, Groups], Mapping[ProgramChannel, int]]


def find_culprits(
    views: Mapping[int, StateView],
    groups: Groups,
    programs: Programs,
    async_ranks: frozenset[int] = frozenset(),
) -> Culprits | None:
    """Return the culprits of a job in which no rank makes progress.

    Args:
        views: State page of each rank.
        groups: Process groups of the job.
        programs: Returns the step program of a rank, if it is known.
        async_ranks: Ranks whose host may be ahead of its device.

    Returns:
        None if no rank waits for another.
    """
    blocked = blocked_operations(views, groups, programs)
    awaited = {rank for operation in blocked for rank in operation.targets}
    graph = wait_for_graph(blocked, {*views, *awaited})
    graph = _with_launch_counts(graph, views, groups, async_ranks)
    components = final_components({rank: sorted(targets) for rank, targets in graph.items()})
    dependents = {component: _dependents(graph, component) for component in components}
    cycles = [component for component in components if len(component) > 1]
    single = [rank for component in components if len(component) == 1 for rank in component]
    mismatched = {
        rank
        for operation in blocked
        if operation.reason is BlockReason.MISMATCH
        for rank in operation.targets
    }
    is_blocked = {operation.rank for operation in blocked} - mismatched
    candidates = [
        rank for rank in single if rank not in is_blocked and dependents[frozenset({rank})]
    ]
    if candidates and _are_blocked_by_devices(candidates, views, groups, async_ranks):
        return _device_culprits(candidates, dependents)
    if candidates:
        return _rank_culprits(candidates, mismatched, blocked, dependents, views)
    if cycles:
        cycle = max(cycles, key=lambda ranks: (len(dependents[ranks]), len(ranks), -min(ranks)))
        return _cycle_culprits(cycle, blocked, views, groups, programs, dependents[cycle])
    launched = [
        operation
        for operation in blocked
        if operation.reason is BlockReason.LAUNCHED and operation.rank in single
    ]
    if launched:
        unfinished = _unfinished_communication(launched, dependents)
        return _ranks_past_it(unfinished, views, groups, programs) or unfinished
    if not awaited and _are_blocked_by_devices(sorted(views), views, groups, async_ranks):
        return _device_culprits(sorted(views), dependents)
    return None


def _rank_culprits(
    candidates: Sequence[int],
    mismatched: set[int],
    blocked: Sequence[BlockedOperation],
    dependents: Dependents,
    views: Mapping[int, StateView],
) -> Culprits:
    """Return the ranks stuck in host code, otherwise those that entered another communication."""
    host = [rank for rank in candidates if rank not in mismatched]
    ranks = sorted(
        host or candidates,
        key=lambda rank: (rank not in views, -len(dependents[frozenset({rank})]), rank),
    )
    waiting = tuple(operation for operation in blocked if operation.targets & set(ranks))
    all_dependents = frozenset[int]().union(*(dependents[frozenset({rank})] for rank in ranks))
    return Culprits("host" if host else "mismatch", tuple(ranks), waiting, all_dependents, {})


def _unfinished_communication(
    launched: Sequence[BlockedOperation], dependents: Dependents
) -> Culprits:
    """Return the communication that blocks most ranks. Its members cannot be distinguished."""
    weights: Counter[tuple[int, ...]] = Counter()
    for operation in launched:
        members = tuple(sorted(operation.members))
        weights[members] += 1 + len(dependents[frozenset({operation.rank})])
    heaviest = max(weights, key=lambda members: (weights[members], members))
    inside = tuple(
        operation for operation in launched if tuple(sorted(operation.members)) == heaviest
    )
    all_dependents = frozenset[int]().union(
        *(dependents[frozenset({operation.rank})] for operation in inside)
    )
    return Culprits("device", (), inside, all_dependents, {})


def _device_culprits(ranks: Sequence[int], dependents: Dependents) -> Culprits:
    all_dependents = frozenset[int]().union(*(dependents[frozenset({rank})] for rank in ranks))
    return Culprits("device", tuple(sorted(ranks)), (), all_dependents, {})


def _are_blocked_by_devices(
    candidates: Sequence[int],
    views: Mapping[int, StateView],
    groups: Groups,
    async_ranks: frozenset[int],
) -> bool:
    """Return whether several hosts wait in the same operation, with equal launch counts."""
    if len(candidates) < 2 or not set(candidates) <= async_ranks:
        return False
    ops = {innermost_op(views[rank]) for rank in candidates}
    if len(ops) > 1 or not ops <= _SYNCHRONIZING_OPS:
        return False
    counts = {rank: entered_counts(rank, views[rank], groups) for rank in candidates}
    first, *others = candidates
    return all(_share_a_launch_count(first, other, counts, groups) for other in others)


def _share_a_launch_count(
    rank: int,
    other: int,
    counts: Mapping[int, Mapping[ProgramChannel, int]],
    groups: Groups,
) -> bool:
    """Return whether two ranks have a channel in common in which both launched equally often."""
    return any(
        count and counts[other].get(_seen_from_peer(channel, rank)) == count
        for channel, count in counts[rank].items()
        if other
        in (groups.members(channel.number) if channel.kind == "group" else (channel.number,))
    )


def _ranks_past_it(
    unfinished: Culprits,
    views: Mapping[int, StateView],
    groups: Groups,
    programs: Programs,
) -> Culprits | None:
    """Return the members that went on because they entered another communication instead."""
    members = set(unfinished.operations[0].members)
    inside = {operation.rank for operation in unfinished.operations}
    departures = _departures(unfinished.dependents & members - inside, views, groups, programs)
    if not departures:
        return None
    return Culprits(
        "mismatch",
        tuple(sorted(departures)),
        unfinished.operations,
        frozenset(views) - set(departures),
        departures,
        frozenset(members),
    )


def _departures(
    ranks: frozenset[int],
    views: Mapping[int, StateView],
    groups: Groups,
    programs: Programs,
    difference: Difference = departures_from,
) -> dict[int, Mapping[ProgramChannel, int]]:
    """Return how each rank that left its program differs from the program."""
    departures: dict[int, Mapping[ProgramChannel, int]] = {}
    for rank in sorted(ranks & views.keys()):
        program = programs(rank)
        changes = difference(program, rank, views[rank], groups) if program is not None else {}
        if changes:
            departures[rank] = changes
    return departures


def _cycle_culprits(
    cycle: frozenset[int],
    blocked: Sequence[BlockedOperation],
    views: Mapping[int, StateView],
    groups: Groups,
    programs: Programs,
    dependents: frozenset[int],
) -> Culprits:
    inside = [operation for operation in blocked if operation.rank in cycle]
    mismatches = [operation for operation in inside if operation.reason is BlockReason.MISMATCH]
    if mismatches:  # also undecided: which members entered the wrong operation
        ranks = {rank for operation in mismatches for rank in operation.targets}
        all_mismatches = tuple(
            operation for operation in blocked if operation.reason is BlockReason.MISMATCH
        )
        return Culprits("mismatch", tuple(sorted(ranks)), all_mismatches, dependents, {})
    departures = _departures(cycle, views, groups, programs)
    ranks = set(departures)
    if not ranks or ranks == cycle:
        ranks = _count_outliers(cycle, views, groups)
    if not ranks or ranks == cycle:
        # A communication that is rare, such as one of an evaluation, is entered by most ranks.
        departures = _departures(cycle, views, groups, programs, communications_outside)
        ranks = set(departures) if 2 * len(departures) <= len(cycle) else set()
    if not ranks or ranks == cycle:
        fewest = min(len(operation.targets) for operation in inside)
        ranks = {
            rank
            for operation in inside
            if len(operation.targets) == fewest
            for rank in operation.targets
        }
    ranks = set() if ranks >= cycle else ranks & cycle
    return Culprits(
        "mismatch",
        tuple(sorted(ranks)),
        tuple(operation for operation in blocked if operation.targets & (ranks or cycle)),
        dependents | (cycle - ranks),
        {rank: changes for rank, changes in departures.items() if rank in ranks},
        cycle,
    )


def _count_outliers(
    cycle: frozenset[int], views: Mapping[int, StateView], groups: Groups
) -> set[int]:
    """Return the ranks whose counts differ from those of most ranks at the same operation.

    Groups with the same name mostly run the same program, so counts are compared by group name.
    """
    by_place: dict[tuple[str, int], dict[int, frozenset[tuple[str, int]]]] = {}
    for rank, view in views.items():
        counts = frozenset(
            (groups.name_of(channel.number), count)
            for channel, count in entered_counts(rank, view, groups).items()
            if channel.kind == "group"
        )
        for frame in communication_frames(view)[:1]:
            name = groups.name(rank, frame.group)
            if frame.peer is None and name is not None:
                by_place.setdefault((name, frame.sequence), {})[rank] = counts
    outliers = set()
    for counts_by_rank in by_place.values():
        usual, votes = Counter(counts_by_rank.values()).most_common(1)[0]
        if 2 * votes > len(counts_by_rank):
            outliers |= {rank for rank, counts in counts_by_rank.items() if counts != usual}
    return outliers & cycle


def _with_launch_counts(
    graph: Graph, views: Mapping[int, StateView], groups: Groups, async_ranks: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Add edges between hosts that wait for their devices, from their launch counts.

    Launching takes no time there, so a rank that launched more than a peer may wait for this peer,
    unless the peer already waits for the rank.
    """
    outside = {rank for rank in views if not communication_frames(views[rank])} & async_ranks
    counts = {rank: entered_counts(rank, views[rank], groups) for rank in outside}
    members = {
        key: groups.members(key)
        for channels in counts.values()
        for kind, key in channels
        if kind == "group"
    }
    extended = dict(graph)
    for rank in outside:
        waiting_for_it = _dependents(graph, frozenset({rank}))
        behind = set()
        for channel, count in counts[rank].items():
            others = members[channel.number] if channel.kind == "group" else (channel.number,)
            for other in others:
                if other == rank or other not in outside or other in waiting_for_it:
                    continue
                if counts[other].get(_seen_from_peer(channel, rank), 0) < count:
                    behind.add(other)
        extended[rank] = extended[rank] | behind
    return extended


def launched_by_all(rank: int, views: Mapping[int, StateView], groups: Groups) -> bool:
    """Return whether all members launched every communication that the rank launched.

    If not, its GPU may execute one of them and wait for the others, while the rank itself is stuck
    in host code.
    """
    for channel, count in entered_counts(rank, views[rank], groups).items():
        is_group = channel.kind == "group"
        for other in groups.members(channel.number) if is_group else (channel.number,):
            if other == rank:
                continue
            if other not in views:
                return False
            counts = entered_counts(other, views[other], groups)
            if counts.get(_seen_from_peer(channel, rank), 0) < count:
                return False
    return True


def _seen_from_peer(channel: ProgramChannel, rank: int) -> ProgramChannel:
    """Return the same channel as the other end counts it."""
    if channel.kind == "group":
        return channel
    return ProgramChannel("receive" if channel.kind == "send" else "send", rank)


def _dependents(graph: Graph, awaited: frozenset[int]) -> frozenset[int]:
    """Return all other ranks that wait for one of `awaited`, directly or through others."""
    waiting: dict[int, set[int]] = {}
    for rank, targets in graph.items():
        for target in targets:
            waiting.setdefault(target, set()).add(rank)
    dependents: set[int] = set()
    queue = list(awaited)
    while queue:
        for rank in waiting.get(queue.pop(), ()):
            if rank not in dependents and rank not in awaited:
                dependents.add(rank)
                queue.append(rank)
    return frozenset(dependents)
