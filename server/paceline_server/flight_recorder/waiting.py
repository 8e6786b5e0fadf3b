"""The reason why each unfinished operation does not finish, and the ranks that cause it.

- The ranks have launched another operation instead (MISMATCH).
- They have not launched it (HOST), or have no dump that would show it (NO_DUMP).
- All have launched it, and on some rank it is queued behind an earlier unfinished one (BEHIND).
- All have launched it and nothing is queued before it: its kernel does not end (DEVICE). The others
  may have finished it, and wait for something later that this rank's host did not come to.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from paceline_server.flight_recorder.dump import Dump, DumpEntry, Signature
from paceline_server.flight_recorder.operations import Operation

# These operations have the same number of elements on every rank. Others may differ by design:
# uneven splits, or tensors that exist on the root only.
_EVEN = {"all_reduce", "allreduce", "broadcast", "reduce", "p2p"}
_EVEN |= {"_all_gather_base", "_allgather_base", "_reduce_scatter_base"}


class DumpWaitReason(enum.Enum):
    """Why an operation does not finish."""

    HOST = "host"
    NO_DUMP = "no dump"
    MISMATCH = "mismatch"
    BEHIND = "behind"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class DumpWait:
    """One unfinished operation and the ranks that prevent it from finishing."""

    operation: Operation
    reason: DumpWaitReason
    targets: frozenset[int]
    is_certain: bool = True  # False: one of the targets; the dumps do not show which

    @property
    def op(self) -> str:
        """The expected operation: the one launched by the ranks that are not to blame."""
        arrivals = self.operation.arrivals
        due = [rank for rank in arrivals if rank not in self.targets]
        if self.operation.is_p2p or not due:
            return self.operation.op
        return arrivals[min(due)].signature.op


def waits_of(operations: Iterable[Operation], dumps: Mapping[int, Dump]) -> list[DumpWait]:
    """Return every operation that a rank prevents from finishing, with the reason."""
    operations = list(operations)
    earliest: dict[int, int] = {}
    for operation in operations:
        for rank in operation.unfinished():
            order = operation.arrivals[rank].order
            earliest[rank] = min(earliest.get(rank, order), order)
    votes = _Votes(dumps)
    waits = (_wait(operation, earliest, dumps, votes) for operation in operations)
    return [wait for wait in waits if wait.targets]


def _wait(
    operation: Operation, earliest: Mapping[int, int], dumps: Mapping[int, Dump], votes: _Votes
) -> DumpWait:
    outliers = votes.outliers(operation)
    if outliers:
        return DumpWait(
            operation,
            DumpWaitReason.MISMATCH,
            frozenset(outliers),
            outliers != set(operation.arrivals),
        )
    if operation.missing:
        return DumpWait(operation, DumpWaitReason.HOST, frozenset(operation.missing))
    if operation.silent:
        return DumpWait(operation, DumpWaitReason.NO_DUMP, frozenset(operation.silent))
    if operation.outdated:
        return DumpWait(operation, DumpWaitReason.HOST, frozenset())
    unfinished = operation.unfinished()
    suspects = _not_started(operation, dumps) or unfinished
    late = {rank for rank in suspects if operation.arrivals[rank].order > earliest[rank]}
    if late:
        return DumpWait(operation, DumpWaitReason.BEHIND, frozenset(late), is_certain=False)
    is_certain = len(suspects) == 1 or suspects != set(operation.members)
    return DumpWait(operation, DumpWaitReason.DEVICE, frozenset(suspects), is_certain)


def _not_started(operation: Operation, dumps: Mapping[int, Dump]) -> set[int]:
    """Return ranks whose kernel has not started although another's has; empty if unknown.

    Recording of starts is one setting of the job. A dump of active entries from the faulty rank
    shows no start, so the setting is taken from the other dumps.
    """
    begun = {rank for rank, entry in operation.arrivals.items() if entry.started}
    if not any(dumps[rank].is_timed for rank in begun):
        return set()
    return set(operation.arrivals) - begun


class _Votes:
    """Operations that the participants launched, and the most common one."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps

    @cached_property
    def _launched_by_place(self) -> Mapping[Hashable, Counter[Hashable]]:
        """The operations that all ranks launched at each position.

        Groups of one purpose (for example all tensor groups) usually run the same program.
        """
        launched: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        for dump in self._dumps.values():
            for entry in dump.entries:
                launched[_place(entry)][_claim(entry.signature, True)] += 1
        return launched

    def outliers(self, operation: Operation) -> set[int]:
        """Return the ranks that launched another operation than the majority.

        All ranks without a majority.
        """
        signatures = {rank: entry.signature for rank, entry in operation.arrivals.items()}
        has_dtypes = all(signature.dtype is not None for signature in signatures.values())
        claims = {rank: _claim(signature, has_dtypes) for rank, signature in signatures.items()}
        counts = Counter(claims.values())
        if len(counts) < 2:
            return set()
        most = max(counts.values())
        leading = [claim for claim, count in counts.items() if count == most]
        if len(leading) > 1:
            launched = self._launched_by_place[_place(next(iter(operation.arrivals.values())))]
            most = max(launched[claim] for claim in leading)
            leading = [claim for claim in leading if launched[claim] == most]
        if len(leading) > 1:
            return set(operation.arrivals)
        return {rank for rank, claim in claims.items() if claim != leading[0]}


def _place(entry: DumpEntry) -> Hashable:
    return entry.description, entry.is_p2p, entry.sequence


def _claim(signature: Signature, with_dtype: bool) -> Hashable:
    op = signature.op.removesuffix("v") if signature.op.startswith("all") else signature.op
    elements = (signature.elements_in, signature.elements_out) if op in _EVEN else None
    return op, elements, signature.dtype if with_dtype else None
