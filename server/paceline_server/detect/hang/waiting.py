"""Who waits for whom, and why, read from the ranks' state pages.

A rank in a collective waits for every member of the group that has not entered that number; a
rank in a transfer for a peer that has not begun the matching one. Where all have entered, it waits
for those that entered something else, or for nobody: the operation itself does not end.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline_server.detect.hang.program import ProgramChannel, RankProgram
from paceline_server.steps.groups import Groups
from paceline_wire.ring import Frame, GroupProgress, StateView
from paceline_wire.spans import COMMUNICATION_OPS, RECEIVE_OPS, Op

# Payloads are the same on every rank for these; others may be split unevenly by design, or exist
# on the root only.
_EVEN_OPS = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE})

Graph = Mapping[int, frozenset[int]]


class BlockReason(enum.Enum):
    """Why an operation does not end: because of its targets, or else of itself."""

    MISSING = "not entered"  # the targets have not entered it
    MISMATCH = "entered another"  # the targets entered another op, or another size
    ELSEWHERE = "entered, and left alone"  # the targets launched it and are stuck in host code
    LAUNCHED = "launched"  # all are in it


@dataclass(frozen=True, slots=True)
class BlockedOperation:
    """One rank held by one communication."""

    rank: int
    frame: Frame
    channel: ProgramChannel | None  # None: its group was never defined
    reason: BlockReason
    targets: frozenset[int]
    members: tuple[int, ...]


def communication_frames(view: StateView) -> list[Frame]:
    """The communications in flight that are known by their number, innermost first."""
    return [
        frame for frame in reversed(view.frames) if frame.op in COMMUNICATION_OPS and frame.sequence
    ]


def innermost_op(view: StateView) -> int:
    return view.frames[-1].op if view.frames else Op.STEP


def waits(
    views: Mapping[int, StateView],
    groups: Groups,
    program: Callable[[int], RankProgram | None] = lambda rank: None,
) -> list[BlockedOperation]:
    """What each rank waits in. Ranks without a view have entered nothing."""
    host = {rank for rank, view in views.items() if not communication_frames(view)}
    table = _Table(views, groups)
    found = []
    for rank, view in views.items():
        for frame in communication_frames(view):
            if frame.peer is not None:
                found.append(_transfer(rank, frame, views, host))
            else:
                found.append(_collective(rank, frame, table, host, program))
    return found


def graph_of(found: Iterable[BlockedOperation], ranks: Iterable[int]) -> dict[int, frozenset[int]]:
    """Rank -> the other ranks it waits for."""
    graph: dict[int, frozenset[int]] = {rank: frozenset() for rank in ranks}
    for wait in found:
        graph[wait.rank] = graph[wait.rank] | (wait.targets - {wait.rank})
    return graph


def _transfer(
    rank: int, frame: Frame, views: Mapping[int, StateView], host: set[int]
) -> BlockedOperation:
    peer = frame.peer
    assert peer is not None
    receives = frame.op in RECEIVE_OPS
    channel = ProgramChannel("receive" if receives else "send", peer)
    begun = 0
    view = views.get(peer)
    for progress in view.peers if view is not None else ():
        if progress.peer == rank:
            begun = progress.send_entered if receives else progress.recv_entered
    reason = BlockReason.LAUNCHED
    if begun < frame.sequence:
        reason = BlockReason.MISSING
    elif peer in host:
        reason = BlockReason.ELSEWHERE
    targets = frozenset() if reason is BlockReason.LAUNCHED else frozenset({peer})
    return BlockedOperation(rank, frame, channel, reason, targets, (rank, peer))


class _Table:
    """The progress of each member in each group, by the group's key."""

    def __init__(self, views: Mapping[int, StateView], groups: Groups) -> None:
        self.groups = groups
        self._progress: dict[int, dict[int, GroupProgress]] = {}
        self._named: dict[tuple[str, int], Counter[tuple[int, int]]] = {}
        for rank, view in views.items():
            for progress in view.groups:
                key = groups.key(rank, progress.group)
                if key is None:
                    continue
                known = self._progress.setdefault(key, {}).get(rank)
                if known is None or known.entered < progress.entered:
                    self._progress[key][rank] = progress
                name = (groups.name_of(key), progress.entered)
                self._named.setdefault(name, Counter())[claim(progress.op, progress.bytes)] += 1

    def of(self, key: int) -> Mapping[int, GroupProgress]:
        return self._progress.get(key, {})

    def elsewhere(self, key: int, sequence: int) -> Counter[tuple[int, int]]:
        """What ranks of all groups of this name entered as this number."""
        return self._named.get((self.groups.name_of(key), sequence), Counter())


def claim(op: int, size: int) -> tuple[int, int]:
    """What members of a group must agree on. Size 0: not known, or not to be compared."""
    return op, size if op in _EVEN_OPS else 0


def _collective(
    rank: int,
    frame: Frame,
    table: _Table,
    host: set[int],
    program: Callable[[int], RankProgram | None],
) -> BlockedOperation:
    key = table.groups.key(rank, frame.group)
    if key is None:
        return BlockedOperation(rank, frame, None, BlockReason.LAUNCHED, frozenset(), (rank,))
    members = table.groups.members(key)
    progress = table.of(key)
    entered = {member: progress[member].entered for member in members if member in progress}
    entered[rank] = max(entered.get(rank, 0), frame.sequence)
    missing = frozenset(member for member in members if entered.get(member, 0) < frame.sequence)
    odd = _odd_ones(key, frame.sequence, members, table, program)
    reason, targets = BlockReason.LAUNCHED, frozenset[int]()
    if odd:
        reason, targets = BlockReason.MISMATCH, odd
    elif missing:
        reason, targets = BlockReason.MISSING, missing
    elif elsewhere := frozenset(members) & host - {rank}:
        reason, targets = BlockReason.ELSEWHERE, elsewhere
    return BlockedOperation(rank, frame, ProgramChannel("group", key), reason, targets, members)


def _odd_ones(
    key: int,
    sequence: int,
    members: tuple[int, ...],
    table: _Table,
    program: Callable[[int], RankProgram | None],
) -> frozenset[int]:
    """Members that entered something else than the others as this number; who cannot be told: all.

    Judged by what each of them did there in the steps before, else by most of the members, else by
    most of all groups of this name.
    """
    progress = table.of(key)
    claims = {
        member: claim(progress[member].op, progress[member].bytes)
        for member in members
        if member in progress and progress[member].entered == sequence
    }
    if any(size == 0 for _, size in claims.values()):
        claims = {member: (op, 0) for member, (op, _) in claims.items()}
    disagree = len(set(claims.values())) > 1
    if not disagree and len(claims) == len(members):
        return frozenset()
    changed = frozenset(
        member for member in claims if _did_something_else(member, key, sequence, claims, program)
    )
    if changed and changed != set(claims):
        return changed
    if not disagree:  # with those that went on, or are not there yet, nothing can be compared
        gone_on = any(progress[member].entered > sequence for member in progress)
        return changed if gone_on else frozenset()
    continued = {m for m in claims if _is_as_the_one_before(claims[m], key, program(m))}
    if continued and continued != set(claims) and 2 * len(continued) >= len(claims):
        return frozenset(claims) - continued
    votes = Counter(claims.values())
    usual = _leader(votes) or _leader(table.elsewhere(key, sequence))
    if usual is None or usual not in votes:
        return frozenset(claims)
    return frozenset(member for member, said in claims.items() if said != usual)


def _is_as_the_one_before(said: tuple[int, int], key: int, own: RankProgram | None) -> bool:
    """Sizes that follow the data differ between steps, and hardly from one layer to the next."""
    return own is not None and own.sizes.get((ProgramChannel("group", key), said[0])) == said[1]


def _did_something_else(
    rank: int,
    key: int,
    sequence: int,
    claims: Mapping[int, tuple[int, int]],
    program: Callable[[int], RankProgram | None],
) -> bool:
    own = program(rank)
    before = None if own is None else own.expected(ProgramChannel("group", key), sequence)
    if before is None:
        return False
    op, size = claim(before.op, before.bytes)
    said_op, said_size = claims[rank]
    return op != said_op or (size != said_size and bool(size and said_size))


def _leader(votes: Counter[tuple[int, int]]) -> tuple[int, int] | None:
    """What most say; None: two things equally often."""
    first = votes.most_common(2)
    if not first or (len(first) == 2 and first[0][1] == first[1][1]):
        return None
    return first[0][0]
