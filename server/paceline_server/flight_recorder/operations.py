"""The unfinished operations of all ranks, joined: which ranks have launched each.

A collective is one operation for all ranks of its group, joined by group and sequence number. A
message is joined by sender and receiver, in the order in which the two ranks launched their
unfinished messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline_server.flight_recorder.dump import Dump, DumpEntry, DumpGroup

# A rank that has finished one of these knows that every participant has launched it.
_SYNCHRONIZING = ("all_reduce", "allreduce", "barrier", "all_to_all", "alltoall", "reduce_scatter")
_SYNCHRONIZING_GATHERS = ("all_gather", "allgather")


@dataclass(slots=True)
class Operation:
    """One collective or message that some rank has launched and not finished."""

    group: DumpGroup
    is_p2p: bool
    op: str  # all_reduce, send 0->1, ...
    sequence: int
    members: tuple[int, ...]
    arrivals: dict[int, DumpEntry] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)  # have not launched it
    silent: set[int] = field(default_factory=set)  # left no dump
    outdated: set[int] = field(default_factory=set)  # have launched it since their dump, or more
    sends_only: bool = False  # a message whose receiver has not arrived: rarely the cause of a wait

    def unfinished(self) -> set[int]:
        return {rank for rank, entry in self.arrivals.items() if not entry.completed}

    def launched_ns(self) -> int:
        """The time when the first participant launched it, on that rank's clock."""
        return min(entry.created_ns for entry in self.arrivals.values())


def known_ranks(dumps: Mapping[int, Dump], expected: Iterable[int] = ()) -> set[int]:
    """Return the ranks with a dump, the ranks of all groups, and the expected ranks."""
    ranks = {*dumps, *expected}
    for dump in dumps.values():
        for group in dump.groups.values():
            ranks.update(group.ranks)
    # Without group lists (gloo), a gap in the numbers is a rank without a dump; with mostly gaps,
    # the folder belongs to one node.
    world_size = max(ranks, default=-1) + 1
    return set(range(world_size)) if world_size <= 2 * len(ranks) else ranks


def unfinished_operations(
    dumps: Mapping[int, Dump], expected: Iterable[int] = ()
) -> list[Operation]:
    groups = _Groups(dumps, known_ranks(dumps, expected))
    return [*_collectives(dumps, groups), *_messages(dumps, groups)]


class _Groups:
    """The group of an entry, with its ranks from any dump that lists them."""

    def __init__(self, dumps: Mapping[int, Dump], world: set[int]) -> None:
        self._own: dict[tuple[int, str], DumpGroup] = {}
        self._listed: dict[str, set[DumpGroup]] = defaultdict(set)
        users: dict[str, set[int]] = defaultdict(set)
        for rank, dump in dumps.items():
            for name, group in dump.groups.items():
                if group.ranks:
                    self._own[rank, name] = group
                    self._listed[name].add(group)
            for used in {entry.group for entry in dump.entries}:
                users[used].add(rank)
        self._users = users
        self._world = world
        self._derived: dict[str, DumpGroup] = {}

    def of(self, rank: int, entry: DumpEntry) -> DumpGroup:
        own = self._own.get((rank, entry.group))
        if own is not None:
            return own
        listed = [group for group in self._listed[entry.group] if rank in group.ranks]
        if len(listed) == 1:
            return listed[0]
        return self._derived.setdefault(entry.group, self._derive(entry))

    def _derive(self, entry: DumpEntry) -> DumpGroup:
        is_default = entry.description == "default_pg" or entry.group in ("0", "default_pg")
        ranks = self._world if is_default else self._users[entry.group]
        return DumpGroup(entry.group, entry.description, tuple(sorted(ranks)))


def _collectives(dumps: Mapping[int, Dump], groups: _Groups) -> list[Operation]:
    # Almost all operations are finished on all ranks; these are removed before joining.
    unfinished = {
        (entry.group, entry.sequence)
        for dump in dumps.values()
        for entry in dump.entries
        if not entry.completed and entry.is_collective
    }
    operations: dict[tuple[str, tuple[int, ...], int], Operation] = {}
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if not entry.is_collective or (entry.group, entry.sequence) not in unfinished:
                continue
            group = groups.of(rank, entry)
            key = (group.name, group.ranks, entry.sequence)
            operation = operations.get(key)
            if operation is None:
                operation = operations[key] = Operation(
                    group, False, entry.signature.op, entry.sequence, group.ranks
                )
            # The first operation of a coalesced batch with the same number represents all of them.
            operation.arrivals.setdefault(rank, entry)
    progress = _GroupProgress(dumps)
    open_operations = [o for o in operations.values() if o.unfinished()]
    for operation in open_operations:
        _find_absent(operation, dumps, progress)
    return open_operations


def _find_absent(operation: Operation, dumps: Mapping[int, Dump], progress: _GroupProgress) -> None:
    absent = set(operation.members) - set(operation.arrivals)
    operation.silent = {rank for rank in absent if rank not in dumps}
    not_past = {rank for rank in absent - operation.silent if not progress.is_past(rank, operation)}
    if _synchronizes(operation.op) and any(e.completed for e in operation.arrivals.values()):
        # Finished on one rank means launched on all: the others' dumps were taken earlier.
        operation.outdated = not_past
    else:
        operation.missing = not_past
    operation.outdated |= {
        rank
        for rank in operation.unfinished()
        if progress.finished_by_others(rank, operation) > progress.last(rank, operation)
    }


def _synchronizes(op: str) -> bool:
    return op.lstrip("_").startswith((*_SYNCHRONIZING, *_SYNCHRONIZING_GATHERS))


class _GroupProgress:
    """Progress of each rank in each group, for collectives that are not in its dump.

    A ring contains only the newest entries, and a dump of active entries has no finished ones.
    """

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._last_of: dict[int, dict[str, int]] = {}

    def last(self, rank: int, operation: Operation) -> int:
        """Return the last collective of the operation's group that is in the rank's dump."""
        return self._last(rank).get(operation.group.name, 0)

    def finished_by_others(self, rank: int, operation: Operation) -> int:
        """Return the last collective of the group that others finished, as only all together can.

        If it is not in the rank's dump, that dump is older than theirs.
        """
        members = set(operation.members) - {rank}
        return max((self._finished[operation.group.name, other] for other in members), default=0)

    @cached_property
    def _finished(self) -> Mapping[tuple[str, int], int]:
        """Return the last finished synchronizing collective by group and rank; default 0."""
        finished: dict[tuple[str, int], int] = defaultdict(int)
        for rank, dump in self._dumps.items():
            for entry in dump.entries:
                if entry.is_collective and entry.completed and _synchronizes(entry.signature.op):
                    key = entry.group, rank
                    finished[key] = max(finished[key], entry.sequence)
        return finished

    def _last(self, rank: int) -> Mapping[str, int]:
        """Return by group the last collective with an entry."""
        if rank not in self._last_of:
            last = self._last_of[rank] = {}
            for entry in self._dumps[rank].entries:
                if not entry.is_p2p:
                    last[entry.group] = max(last.get(entry.group, 0), entry.sequence)
        return self._last_of[rank]

    @cached_property
    def _messages(self) -> Mapping[str, set[int]]:
        """Return by group the numbers of all messages."""
        messages: dict[str, set[int]] = defaultdict(set)
        for dump in self._dumps.values():
            for entry in dump.entries:
                if entry.is_p2p:
                    messages[entry.group].add(entry.sequence)
        return messages

    def is_past(self, rank: int, operation: Operation) -> bool:
        """Return whether a rank without an entry of this collective has launched it."""
        name, sequence = operation.group.name, operation.sequence
        if self._last(rank).get(name, 0) >= sequence:
            return True
        backend = next(iter(operation.arrivals.values())).backend
        status = self._dumps[rank].status.get(name)
        if backend != "nccl" or status is None or status.completed is None:
            return False
        # The status counts the kind used last; if both kinds are in use, the closer count is meant.
        return status.completed >= sequence and all(
            abs(status.completed - sequence) < abs(status.completed - message)
            for message in self._messages[name]
        )


def _messages(dumps: Mapping[int, Dump], groups: _Groups) -> list[Operation]:
    sides: dict[tuple[DumpGroup, int, int], dict[bool, list[DumpEntry]]] = defaultdict(
        lambda: {True: [], False: []}
    )
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if entry.peers is None or entry.completed:
                continue
            group = groups.of(rank, entry)
            if max(entry.peers.sender, entry.peers.receiver) < len(group.ranks):
                sender = group.ranks[entry.peers.sender]
                receiver = group.ranks[entry.peers.receiver]
                sides[group, sender, receiver][entry.peers.sends].append(entry)
    return [
        operation
        for (group, sender, receiver), side in sides.items()
        for operation in _paired(group, sender, receiver, side, dumps)
    ]


def _paired(
    group: DumpGroup,
    sender: int,
    receiver: int,
    side: Mapping[bool, list[DumpEntry]],
    dumps: Mapping[int, Dump],
) -> Iterable[Operation]:
    """Join the messages of two ranks by order; their numbers count per rank and cannot be used."""
    sends, receives = side[True], side[False]
    for index in range(max(len(sends), len(receives))):
        arrivals = {}
        if index < len(receives):
            arrivals[receiver] = receives[index]
        if index < len(sends):
            arrivals[sender] = sends[index]
        entry = next(iter(arrivals.values()))
        what = f"send {sender}->{receiver}" if sender in arrivals else f"recv {receiver}<-{sender}"
        operation = Operation(
            group, True, what, entry.sequence, (sender, receiver), arrivals=arrivals
        )
        operation.sends_only = receiver not in arrivals
        for rank in {sender, receiver} - set(arrivals):
            (operation.missing if rank in dumps else operation.silent).add(rank)
        yield operation
