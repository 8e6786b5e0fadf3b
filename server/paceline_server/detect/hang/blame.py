"""From the wait-for graph to the culprit of a hang: whoever is waited for and waits for nobody.

Ranks that wait for each other in a circle have done things in different orders: the one to blame
left its own program, or differs from those that stand at the same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline_server.detect.finding import Side
from paceline_server.detect.hang.program import ProgramChannel, RankProgram, departs, entered
from paceline_server.detect.hang.waiting import (
    BlockedOperation,
    BlockReason,
    Graph,
    communication_frames,
    graph_of,
    innermost_op,
    waits,
)
from paceline_server.flight_recorder.components import final_components
from paceline_server.steps.groups import Groups
from paceline_wire.ring import StateView
from paceline_wire.spans import COMPUTE_OPS, Op

# In which a host waits for its device, where communications are launched and left alone.
_SYNCHRONISING_OPS = COMPUTE_OPS | {Op.STEP, Op.OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Blame:
    """`ranks`: the culprits, the most waited for first; empty: nobody in particular.

    `waits` are those that point at the culprits or, of a communication that all launched, those
    in it; `dependents` everyone who waits for a culprit, through others too.
    """

    side: Side
    ranks: tuple[int, ...]
    waits: tuple[BlockedOperation, ...]
    dependents: frozenset[int]
    departures: Mapping[int, Mapping[ProgramChannel, int]]  # of culprits that left their program
    circle: frozenset[int] = frozenset()  # ranks that wait for each other


def blame(
    views: Mapping[int, StateView],
    groups: Groups,
    program: Callable[[int], RankProgram | None],
    on_device: frozenset[int] = frozenset(),
) -> Blame | None:
    """None: nobody waits for anybody. `on_device`: ranks whose host may be ahead of its device."""
    found = waits(views, groups, program)
    awaited = {rank for wait in found for rank in wait.targets}
    graph = graph_of(found, {*views, *awaited})
    graph = _with_launches(graph, views, groups, on_device)
    components = final_components({rank: sorted(targets) for rank, targets in graph.items()})
    reach = {component: _dependents(graph, component) for component in components}
    circles = [one for one in components if len(one) > 1]
    alone = [rank for one in components if len(one) == 1 for rank in one]
    odd = {rank for wait in found if wait.reason is BlockReason.MISMATCH for rank in wait.targets}
    held = {wait.rank for wait in found} - odd
    candidates = [rank for rank in alone if rank not in held and reach[frozenset({rank})]]
    if candidates and _in_step_on_device(candidates, views, groups, on_device):
        return _on_device(candidates, reach)
    if candidates:
        return _of_ranks(candidates, odd, found, reach, views)
    if circles:
        circle = max(circles, key=lambda one: (len(reach[one]), len(one), -min(one)))
        return _of_circle(circle, found, views, groups, program, reach[circle])
    launched = [
        wait for wait in found if wait.reason is BlockReason.LAUNCHED and wait.rank in alone
    ]
    if launched:
        stuck = _of_launched(launched, reach)
        return _of_those_gone_on(stuck, views, groups, program) or stuck
    if not awaited and _in_step_on_device(sorted(views), views, groups, on_device):
        return _on_device(sorted(views), reach)
    return None


def _of_ranks(
    candidates: Sequence[int],
    odd: set[int],
    found: Sequence[BlockedOperation],
    reach: Mapping[frozenset[int], frozenset[int]],
    seen: Mapping[int, StateView],
) -> Blame:
    """A rank stuck by itself explains more than one that entered something else."""
    host = [rank for rank in candidates if rank not in odd]
    ranks = sorted(
        host or candidates,
        key=lambda rank: (rank not in seen, -len(reach[frozenset({rank})]), rank),
    )
    pointing = tuple(wait for wait in found if wait.targets & set(ranks))
    dependents = frozenset[int]().union(*(reach[frozenset({rank})] for rank in ranks))
    return Blame("host" if host else "mismatch", tuple(ranks), pointing, dependents, {})


def _of_launched(
    launched: Sequence[BlockedOperation], reach: Mapping[frozenset[int], frozenset[int]]
) -> Blame:
    """The communication that most ranks stand in or wait for; its members are not told apart."""
    weights: Counter[tuple[int, ...]] = Counter()
    for wait in launched:
        weights[tuple(sorted(wait.members))] += 1 + len(reach[frozenset({wait.rank})])
    members = max(weights, key=lambda one: (weights[one], one))
    within = tuple(wait for wait in launched if tuple(sorted(wait.members)) == members)
    dependents = frozenset[int]().union(*(reach[frozenset({wait.rank})] for wait in within))
    return Blame("device", (), within, dependents, {})


def _on_device(ranks: Sequence[int], reach: Mapping[frozenset[int], frozenset[int]]) -> Blame:
    dependents = frozenset[int]().union(*(reach[frozenset({rank})] for rank in ranks))
    return Blame("device", tuple(sorted(ranks)), (), dependents, {})


def _in_step_on_device(
    candidates: Sequence[int],
    views: Mapping[int, StateView],
    groups: Groups,
    on_device: frozenset[int],
) -> bool:
    """Several hosts at the same place, whose group has launched the same: it is their devices."""
    if len(candidates) < 2 or not set(candidates) <= on_device:
        return False
    ops = {innermost_op(views[rank]) for rank in candidates}
    if len(ops) > 1 or not ops <= _SYNCHRONISING_OPS:
        return False
    counts = {rank: entered(rank, views[rank], groups) for rank in candidates}
    first, *others = candidates
    return all(_launched_alike(first, other, counts, groups) for other in others)


def _launched_alike(
    one: int, other: int, counts: Mapping[int, Mapping[ProgramChannel, int]], groups: Groups
) -> bool:
    """Whether two ranks have something in common of which both have launched as much."""
    return any(
        count and counts[other].get(_mirrored(channel, one)) == count
        for channel, count in counts[one].items()
        if other
        in (groups.members(channel.number) if channel.kind == "group" else (channel.number,))
    )


def _of_those_gone_on(
    stuck: Blame,
    views: Mapping[int, StateView],
    groups: Groups,
    program: Callable[[int], RankProgram | None],
) -> Blame | None:
    """Participants that are past what never ended for the others took another for it."""
    members = set(stuck.waits[0].members)
    within = {wait.rank for wait in stuck.waits}
    departures = _departures(stuck.dependents & members - within, views, groups, program)
    if not departures:
        return None
    return Blame(
        "mismatch",
        tuple(sorted(departures)),
        stuck.waits,
        frozenset(views) - set(departures),
        departures,
        frozenset(members),
    )


def _departures(
    ranks: frozenset[int],
    views: Mapping[int, StateView],
    groups: Groups,
    program: Callable[[int], RankProgram | None],
) -> dict[int, Mapping[ProgramChannel, int]]:
    """Of those that left their program, how."""
    found: dict[int, Mapping[ProgramChannel, int]] = {}
    for rank in sorted(ranks & views.keys()):
        own = program(rank)
        changed = departs(own, rank, views[rank], groups) if own is not None else {}
        if changed:
            found[rank] = changed
    return found


def _of_circle(
    circle: frozenset[int],
    found: Sequence[BlockedOperation],
    views: Mapping[int, StateView],
    groups: Groups,
    program: Callable[[int], RankProgram | None],
    dependents: frozenset[int],
) -> Blame:
    inside = [wait for wait in found if wait.rank in circle]
    if any(
        wait.reason is BlockReason.MISMATCH for wait in inside
    ):  # and nobody can tell who is odd
        odd = frozenset(r for w in inside if w.reason is BlockReason.MISMATCH for r in w.targets)
        pointing = tuple(wait for wait in found if wait.reason is BlockReason.MISMATCH)
        return Blame("mismatch", tuple(sorted(odd)), pointing, dependents, {})
    departures = _departures(circle, views, groups, program)
    ranks = set(departures)
    if not ranks or ranks == circle:
        ranks = _out_of_line(circle, views, groups)
    if not ranks or ranks == circle:
        fewest = min(len(wait.targets) for wait in inside)
        ranks = {r for wait in inside if len(wait.targets) == fewest for r in wait.targets}
    ranks = set() if ranks >= circle else ranks & circle
    return Blame(
        "mismatch",
        tuple(sorted(ranks)),
        tuple(wait for wait in found if wait.targets & (ranks or circle)),
        dependents | (circle - ranks),
        {rank: changed for rank, changed in departures.items() if rank in ranks},
        circle,
    )


def _out_of_line(
    circle: frozenset[int], views: Mapping[int, StateView], groups: Groups
) -> set[int]:
    """Ranks whose counts differ from those of most ranks that stand at the same place.

    Groups of one name mostly run the same program, so their counts are compared by name.
    """
    places: dict[tuple[str, int], dict[int, frozenset[tuple[str, int]]]] = {}
    for rank, view in views.items():
        counts = frozenset(
            (groups.name_of(channel.number), count)
            for channel, count in entered(rank, view, groups).items()
            if channel.kind == "group"
        )
        for frame in communication_frames(view)[:1]:
            name = groups.name(rank, frame.group)
            if frame.peer is None and name is not None:
                places.setdefault((name, frame.sequence), {})[rank] = counts
    odd = set()
    for standing in places.values():
        usual, votes = Counter(standing.values()).most_common(1)[0]
        if 2 * votes > len(standing):
            odd |= {rank for rank, counts in standing.items() if counts != usual}
    return odd & circle


def _with_launches(
    graph: Graph, views: Mapping[int, StateView], groups: Groups, on_device: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Add what hosts that wait for their device show by their counts alone.

    Launching takes no time there, so a rank that launched more than a peer may wait for it; never
    one that the peer is known to wait for.
    """
    outside = {rank for rank in views if not communication_frames(views[rank])} & on_device
    counts = {rank: entered(rank, views[rank], groups) for rank in outside}
    members = {
        key: groups.members(key) for one in counts.values() for kind, key in one if kind == "group"
    }
    answer = dict(graph)
    for rank in outside:
        waiting_for_it = _dependents(graph, frozenset({rank}))
        behind = set()
        for channel, count in counts[rank].items():
            others = members[channel.number] if channel.kind == "group" else (channel.number,)
            for other in others:
                if other == rank or other not in outside or other in waiting_for_it:
                    continue
                if counts[other].get(_mirrored(channel, rank), 0) < count:
                    behind.add(other)
        answer[rank] = answer[rank] | behind
    return answer


def _mirrored(channel: ProgramChannel, rank: int) -> ProgramChannel:
    """The same channel as the other end counts it."""
    if channel.kind == "group":
        return channel
    return ProgramChannel("receive" if channel.kind == "send" else "send", rank)


def _dependents(graph: Graph, awaited: frozenset[int]) -> frozenset[int]:
    """All ranks that wait for one of `awaited`, directly or through others; not those."""
    waiting: dict[int, set[int]] = {}
    for rank, targets in graph.items():
        for target in targets:
            waiting.setdefault(target, set()).add(rank)
    found: set[int] = set()
    reached = list(awaited)
    while reached:
        for rank in waiting.get(reached.pop(), ()):
            if rank not in found and rank not in awaited:
                found.add(rank)
                reached.append(rank)
    return frozenset(found)
