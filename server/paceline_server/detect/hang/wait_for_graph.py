"""Step 1 of a hang verdict: which rank waits for which, read from the ranks' state pages.

A rank in a collective waits for every member of the group that has not entered the collective with
this sequence number. A rank in a transfer waits for a peer that has not started the matching
transfer. If all have entered, it waits for those that entered a different operation. If all entered
the same one, it waits for no rank: the operation itself does not end.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline_server.detect.hang.step_program import ProgramChannel, RankProgram
from paceline_server.steps.groups import Groups
from paceline_wire.ring import Frame, GroupProgress, StateView
from paceline_wire.spans import COMMUNICATION_OPS, RECEIVE_OPS, Op

# The payload of these has the same size on every rank. Others may be split unevenly, or exist on
# the root only.
_EQUAL_SIZE_OPS = frozenset(
    {Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE}
)

Graph = Mapping[int, frozenset[int]]  # by rank: the ranks that it waits for
Programs = Callable[[int], RankProgram | None]
Signature = tuple[int, int]  # op and payload bytes; bytes 0: unknown, or not comparable


class BlockReason(enum.Enum):
    """Why an operation does not end."""

    MISSING = "not entered"  # the targets have not entered it
    MISMATCH = "entered another"  # the targets entered another op, or another size
    LEFT = "launched and left"  # the targets launched it and are now stuck in host code
    LAUNCHED = "launched"  # all members are in it


@dataclass(frozen=True, slots=True)
class BlockedOperation:
    """One communication in which one rank is blocked."""

    rank: int
    frame: Frame
    channel: ProgramChannel | None  # None: its group was never defined
    reason: BlockReason
    targets: frozenset[int]  # the ranks it waits for
    members: tuple[int, ...]


def communication_frames(view: StateView) -> list[Frame]:
    """Return the communications in flight that have a sequence number, innermost first."""
    return [
        frame for frame in reversed(view.frames) if frame.op in COMMUNICATION_OPS and frame.sequence
    ]


def innermost_op(view: StateView) -> int:
    return view.frames[-1].op if view.frames else Op.STEP


def blocked_operations(
    views: Mapping[int, StateView],
    groups: Groups,
    programs: Programs = lambda rank: None,
) -> list[BlockedOperation]:
    """Return every communication in which a rank is blocked.

    A rank without a state page counts as having entered no communication.
    """
    ranks_in_host_code = {rank for rank, view in views.items() if not communication_frames(view)}
    progress = _GroupProgressTable(views, groups)
    blocked = []
    for rank, view in views.items():
        for frame in communication_frames(view):
            if frame.peer is not None:
                blocked.append(_blocked_transfer(rank, frame, views, ranks_in_host_code))
            else:
                blocked.append(
                    _blocked_collective(rank, frame, progress, ranks_in_host_code, programs)
                )
    return blocked


def wait_for_graph(
    blocked: Iterable[BlockedOperation], ranks: Iterable[int]
) -> dict[int, frozenset[int]]:
    """Return, for each rank, the other ranks it waits for."""
    graph: dict[int, frozenset[int]] = {rank: frozenset() for rank in ranks}
    for operation in blocked:
        graph[operation.rank] = graph[operation.rank] | (operation.targets - {operation.rank})
    return graph


def signature_of(op: int, size: int) -> Signature:
    """Return the properties that all members of a group must agree on."""
    return op, size if op in _EQUAL_SIZE_OPS else 0


def _blocked_transfer(
    rank: int, frame: Frame, views: Mapping[int, StateView], ranks_in_host_code: set[int]
) -> BlockedOperation:
    peer = frame.peer
    assert peer is not None
    is_receive = frame.op in RECEIVE_OPS
    channel = ProgramChannel("receive" if is_receive else "send", peer)
    started_by_peer = 0
    view = views.get(peer)
    for progress in view.peers if view is not None else ():
        if progress.peer == rank:
            started_by_peer = progress.send_entered if is_receive else progress.recv_entered
    reason = BlockReason.LAUNCHED
    if started_by_peer < frame.sequence:
        reason = BlockReason.MISSING
    elif peer in ranks_in_host_code:
        reason = BlockReason.LEFT
    targets = frozenset() if reason is BlockReason.LAUNCHED else frozenset({peer})
    return BlockedOperation(rank, frame, channel, reason, targets, (rank, peer))


class _GroupProgressTable:
    """The progress of each member in each group, by the key of the group."""

    def __init__(self, views: Mapping[int, StateView], groups: Groups) -> None:
        self.groups = groups
        self._by_key: dict[int, dict[int, GroupProgress]] = {}
        self._signatures: dict[tuple[str, int], Counter[Signature]] = {}
        for rank, view in views.items():
            for progress in view.groups:
                key = groups.key(rank, progress.group)
                if key is None:
                    continue
                previous = self._by_key.setdefault(key, {}).get(rank)
                if previous is None or previous.entered < progress.entered:
                    self._by_key[key][rank] = progress
                name = (groups.name_of(key), progress.entered)
                signature = signature_of(progress.op, progress.bytes)
                self._signatures.setdefault(name, Counter())[signature] += 1

    def of(self, key: int) -> Mapping[int, GroupProgress]:
        return self._by_key.get(key, {})

    def signatures_by_name(self, key: int, sequence: int) -> Counter[Signature]:
        """Count what the ranks of all groups of this name entered with this sequence number."""
        return self._signatures.get((self.groups.name_of(key), sequence), Counter())


def _blocked_collective(
    rank: int,
    frame: Frame,
    table: _GroupProgressTable,
    ranks_in_host_code: set[int],
    programs: Programs,
) -> BlockedOperation:
    key = table.groups.key(rank, frame.group)
    if key is None:
        return BlockedOperation(rank, frame, None, BlockReason.LAUNCHED, frozenset(), (rank,))
    members = table.groups.members(key)
    progress = table.of(key)
    entered = {member: progress[member].entered for member in members if member in progress}
    entered[rank] = max(entered.get(rank, 0), frame.sequence)
    missing = frozenset(member for member in members if entered.get(member, 0) < frame.sequence)
    mismatched = _mismatched_members(key, frame.sequence, members, table, programs)
    reason, targets = BlockReason.LAUNCHED, frozenset[int]()
    if mismatched:
        reason, targets = BlockReason.MISMATCH, mismatched
    elif missing:
        reason, targets = BlockReason.MISSING, missing
    elif left := frozenset(members) & ranks_in_host_code - {rank}:
        reason, targets = BlockReason.LEFT, left
    return BlockedOperation(rank, frame, ProgramChannel("group", key), reason, targets, members)


def _mismatched_members(
    key: int,
    sequence: int,
    members: tuple[int, ...],
    table: _GroupProgressTable,
    programs: Programs,
) -> frozenset[int]:
    """Return the members that entered another operation with this number than the others did.

    Decided by what each member did at this point in earlier steps, unless most of them left their
    programs together: a rare operation, such as one of an evaluation, is entered by most members.
    Else by the majority of the members, else by the majority of all groups with this name. If
    undecided, all of them.
    """
    progress = table.of(key)
    signatures = {
        member: signature_of(progress[member].op, progress[member].bytes)
        for member in members
        if member in progress and progress[member].entered == sequence
    }
    if any(size == 0 for _, size in signatures.values()):
        signatures = {member: (op, 0) for member, (op, _) in signatures.items()}
    disagree = len(set(signatures.values())) > 1
    if not disagree and len(signatures) == len(members):
        return frozenset()
    changed = frozenset(
        member
        for member in signatures
        if _left_program(member, key, sequence, signatures, programs)
    )
    is_rare = 2 * len(changed) > len(members)
    if changed and changed != set(signatures) and not is_rare:
        return changed
    if not disagree:  # members that are ahead or not there yet cannot be compared
        further = frozenset(member for member in progress if progress[member].entered > sequence)
        if not further:
            return frozenset()
        return further if is_rare else changed
    unchanged = {
        member
        for member in signatures
        if _repeats_last_size(signatures[member], key, programs(member))
    }
    if unchanged and unchanged != set(signatures) and 2 * len(unchanged) >= len(signatures):
        return frozenset(signatures) - unchanged
    votes = Counter(signatures.values())
    majority = _majority(votes) or _majority(table.signatures_by_name(key, sequence))
    if majority is None or majority not in votes:
        return frozenset(signatures)
    return frozenset(member for member, signature in signatures.items() if signature != majority)


def _repeats_last_size(signature: Signature, key: int, program: RankProgram | None) -> bool:
    """Return whether the size equals that of the rank's previous operation of this kind.

    Sizes that depend on the data differ between steps, but rarely between two layers.
    """
    if program is None:
        return False
    op, size = signature
    return program.sizes.get((ProgramChannel("group", key), op)) == size


def _left_program(
    rank: int,
    key: int,
    sequence: int,
    signatures: Mapping[int, Signature],
    programs: Programs,
) -> bool:
    """Return whether the rank entered another operation at this point in earlier steps."""
    program = programs(rank)
    expected = None if program is None else program.expected(ProgramChannel("group", key), sequence)
    if expected is None:
        return False
    op, size = signature_of(expected.op, expected.bytes)
    entered_op, entered_size = signatures[rank]
    return op != entered_op or (size != entered_size and bool(size and entered_size))


def _majority(votes: Counter[Signature]) -> Signature | None:
    """Return the most common signature; None if there is none, or if two are equally common."""
    first = votes.most_common(2)
    if not first or (len(first) == 2 and first[0][1] == first[1][1]):
        return None
    return first[0][0]
