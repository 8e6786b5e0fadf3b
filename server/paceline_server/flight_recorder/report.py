"""The result of the dumps of a hang: culprits, kind, first missing collective, state of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline_server.flight_recorder.culprits import DumpCulprit, culprits_of, narrowed
from paceline_server.flight_recorder.dump import Dump
from paceline_server.flight_recorder.folder import read_folder
from paceline_server.flight_recorder.operations import (
    Operation,
    known_ranks,
    unfinished_operations,
)
from paceline_server.flight_recorder.waiting import DumpWait, DumpWaitReason, waits_of

_RANKS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A group of ranks (global numbers), with the name that the job gave it."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MissingCollective:
    """The first operation that the culprits prevent from finishing."""

    op: str
    sequence_id: int
    is_p2p: bool
    process_group: ProcessGroup
    launched_by: tuple[int, ...]
    not_launched_by: tuple[int, ...]
    differing: tuple[int, ...]  # ranks that launched another operation instead


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """Progress of a rank in one group, as sequence numbers; None: unknown."""

    process_group: str
    description: str
    last_enqueued: int | None
    last_started: int | None
    last_completed: int | None


@dataclass(frozen=True, slots=True)
class RankStanding:
    """State of one rank: culprit, waiting, not waiting, no dump."""

    rank: int
    state: str
    waits_in: str | None
    waits_for: tuple[int, ...]
    groups: tuple[GroupStanding, ...]


@dataclass(frozen=True, slots=True)
class HangReport:
    """The complete result; `kind` is None if no rank hangs."""

    culprits: tuple[int, ...]
    kind: str | None
    is_certain: bool
    process_group: ProcessGroup | None
    first_missing: MissingCollective | None
    verdict: str
    ranks: tuple[RankStanding, ...]
    without_dump: tuple[int, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report(directory: Path) -> HangReport:
    """Read and analyze a folder of dumps. Raises FlightRecorderError."""
    folder = read_folder(directory)
    return analyze(folder.dumps, folder.notes, folder.unreadable)


def analyze(
    dumps: Mapping[int, Dump], notes: Iterable[str] = (), expected: Collection[int] = ()
) -> HangReport:
    """Analyze dumps, without files or clock.

    `expected`: all ranks of the job if known, with or without a dump.
    """
    operations = unfinished_operations(dumps, expected)
    waits = narrowed(waits_of(operations, dumps))
    culprits = culprits_of(waits, dumps)
    ranks = tuple(culprit.rank for culprit in culprits)
    first = _first(culprits)
    without_dump = tuple(sorted(known_ranks(dumps, expected) - set(dumps)))
    return HangReport(
        culprits=ranks,
        kind=_kind(culprits, first),
        is_certain=_are_certain(culprits),
        process_group=None if first is None else _group(first.operation),
        first_missing=None if first is None else _missing(first),
        verdict=_verdict(culprits, first, without_dump),
        ranks=tuple(_standings(dumps, operations, waits, set(ranks), without_dump)),
        without_dump=without_dump,
        notes=(*notes, *_doubts(first, dumps)),
    )


def _doubts(first: DumpWait | None, dumps: Mapping[int, Dump]) -> Iterator[str]:
    if first is None or first.reason is not DumpWaitReason.DEVICE:
        return
    name = first.operation.group.name
    if not any(name in dump.groups and dump.groups[name].ranks for dump in dumps.values()):
        yield (
            f"no dump lists the ranks of group {name}: if the job has ranks after {max(dumps)}, "
            "which left no dump, check those first"
        )


def _first(culprits: Iterable[DumpCulprit]) -> DumpWait | None:
    """Return the wait caused by most culprits; if there are several, the oldest."""
    held_by: dict[int, tuple[DumpWait, int]] = {}
    for culprit in culprits:
        for wait in culprit.waits:
            held_by[id(wait)] = (wait, held_by.get(id(wait), (wait, 0))[1] + 1)
    ranked = [(-count, wait.operation.launched_ns(), wait) for wait, count in held_by.values()]
    return min(ranked, key=lambda item: item[:2])[2] if ranked else None


def _kind(culprits: Iterable[DumpCulprit], first: DumpWait | None) -> str | None:
    return next(
        (c.kind for c in culprits if any(wait is first for wait in c.waits)),
        None,
    )


def _group(operation: Operation) -> ProcessGroup:
    group = operation.group
    return ProcessGroup(group.name, group.description, group.ranks)


def _missing(wait: DumpWait) -> MissingCollective:
    operation = wait.operation
    return MissingCollective(
        op=wait.op,
        sequence_id=operation.sequence,
        is_p2p=operation.is_p2p,
        process_group=_group(operation),
        launched_by=tuple(sorted(operation.arrivals)),
        not_launched_by=tuple(sorted(operation.missing | operation.silent)),
        differing=tuple(sorted(wait.targets)) if wait.reason is DumpWaitReason.MISMATCH else (),
    )


def _standings(
    dumps: Mapping[int, Dump],
    operations: Iterable[Operation],
    waits: Iterable[DumpWait],
    culprits: set[int],
    without_dump: Iterable[int],
) -> list[RankStanding]:
    relevant: dict[int, set[str]] = defaultdict(set)
    for operation in operations:
        for rank in operation.members:
            relevant[rank].add(operation.group.name)
    first: dict[int, DumpWait] = {}
    for wait in waits:
        for rank in wait.operation.unfinished():
            order = wait.operation.arrivals[rank].order
            if rank not in first or order < first[rank].operation.arrivals[rank].order:
                first[rank] = wait
    standings = [
        _standing(dump, first.get(rank), rank in culprits, sorted(relevant[rank]))
        for rank, dump in dumps.items()
    ]
    standings += [RankStanding(rank, "no dump", None, (), ()) for rank in without_dump]
    return sorted(standings, key=lambda standing: standing.rank)


def _standing(
    dump: Dump, wait: DumpWait | None, is_culprit: bool, names: list[str]
) -> RankStanding:
    state = "culprit" if is_culprit else "waiting" if wait else "not waiting"
    others = () if wait is None else tuple(sorted(wait.targets - {dump.rank}))
    named = None if wait is None else _name(wait)
    groups = tuple(_group_standing(dump, name) for name in names)
    return RankStanding(dump.rank, state, named, others, groups)


def _group_standing(dump: Dump, name: str) -> GroupStanding:
    """Return the progress from the rank's status if it has sequence numbers, else from entries."""
    entries = [entry for entry in dump.entries if entry.group == name]
    status = dump.status.get(name)
    group = dump.groups.get(name)
    description = group.description if group else next((e.description for e in entries), "")
    is_nccl = all(entry.backend == "nccl" for entry in entries)
    if status is not None and is_nccl:
        return GroupStanding(name, description, status.enqueued, status.started, status.completed)
    return GroupStanding(
        name,
        description,
        max((e.sequence for e in entries), default=None),
        max((e.sequence for e in entries if e.started), default=None) if dump.is_timed else None,
        max((e.sequence for e in entries if e.completed), default=None),
    )


def _name(wait: DumpWait) -> str:
    group = wait.operation.group
    return f"{wait.op} {wait.operation.sequence} of {group.description or 'group'} ({group.name})"


def _verdict(
    culprits: list[DumpCulprit], first: DumpWait | None, without_dump: tuple[int, ...]
) -> str:
    if first is None and without_dump:
        lost = _ranks(without_dump)
        return f"No dump shows a rank that waits for another one, but {lost} left no dump."
    if first is None:
        return "No hang: no rank waits for another one in a collective or transfer."
    by_end: dict[str, list[DumpCulprit]] = defaultdict(list)
    for culprit in culprits:
        by_end[_end(culprit)].append(culprit)
    named = next(c for c in culprits if any(wait is first for wait in c.waits))
    alike = by_end.pop(_end(named))
    members = _ranks(first.operation.group.ranks)
    waiting = sorted(first.operation.unfinished() - {culprit.rank for culprit in culprits})
    held = f"; {_ranks(waiting)} waited in it" if waiting else ""
    cause, advice = _cause(alike, _end(named), first)
    others = "".join(f"{_subject(some)} {end}. " for end, some in by_end.items())
    return f"{cause} (group of {members}{held}). {others}{advice}"


def _end(culprit: DumpCulprit) -> str:
    """Return how the rank ended, as the predicate of a sentence."""
    if culprit.kind == "mismatch":
        return "launched a different operation"
    is_lost = culprit.waits[0].reason is DumpWaitReason.NO_DUMP
    return "left no dump" if is_lost else f"stopped on the {culprit.kind}"


def _are_certain(culprits: Iterable[DumpCulprit]) -> bool:
    return all(culprit.is_certain for culprit in culprits)


def _subject(culprits: Sequence[DumpCulprit]) -> str:
    who = _ranks(culprit.rank for culprit in culprits)
    if len(culprits) > 1 and not _are_certain(culprits):
        return f"One of {who} (the dumps do not say which)"
    return who[0].upper() + who[1:]


# Advice if one rank is to blame, and if several are.
_COMPARE = (
    "Compare its code path with that of its peers: a condition on the rank or on its data.",
    "Compare their code paths with those of their peers: a condition on the rank or on its data.",
)
_FIND = (
    "Check whether the process is alive, its log and its node.",
    "Check whether the processes are alive, their logs and their nodes.",
)
_READ = (
    "Read its Python stack and its log.",
    "Read their Python stacks and their logs.",
)
_CHECK = (
    "Check its GPU and links (XID errors in the kernel log, `nvidia-smi`).",
    "Check their GPUs and links (XID errors in the kernel log, `nvidia-smi`).",
)


def _cause(culprits: Sequence[DumpCulprit], end: str, first: DumpWait) -> tuple[str, str]:
    """Return the cause as a clause, and a sentence with what to do."""
    who, what = _subject(culprits), _name(first)
    number = len(culprits) > 1 and _are_certain(culprits)
    if first.reason is DumpWaitReason.MISMATCH:
        return f"{who} {end} instead of {what}", _COMPARE[number]
    if first.reason is DumpWaitReason.NO_DUMP:
        return f"{who} {end}, and all other ranks launched {what}", _FIND[number]
    if culprits[0].kind == "mismatch":
        cause = f"{who} launched operations in another order: a different one precedes {what}"
        return cause, _COMPARE[number]
    if first.reason is DumpWaitReason.HOST:
        return f"{who} {end} before launching {what}", _READ[number]
    return f"{who} {end}: every rank launched {what}, and it does not complete", _CHECK[number]


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:_RANKS_SHOWN]))
    more = f" and {len(ordered) - _RANKS_SHOWN} more" if len(ordered) > _RANKS_SHOWN else ""
    return f"rank{'' if len(ordered) == 1 else 's'} {shown}{more}"
