"""One rank's Flight Recorder dump, as typed values.

Versions 2.4 to 2.10 of the format differ in fields that are not needed here (threads, library
versions), so one reader handles all. Three peculiarities of the format are resolved here:

- The `state` of an entry is incomplete. Gloo leaves it `scheduled` and sets `retired`; NCCL leaves
  the members of a coalesced batch `scheduled` and updates only the entry of the batch,
  `nccl:coalesced`. `completed` of a `DumpEntry` takes all of this into account.
- The key of `pg_status` is the rank's own number of a group, the key of `pg_config` the group's
  name; entries have both. A group without an entry is matched by order: both count up with each new
  group.
- `pg_status` counts differ: NCCL counts operations of one kind, gloo all of them. Only NCCL's
  counts are used.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline_server.flight_recorder.errors import MalformedDumpError

# Larger than any configured ring; they limit the cost of a malicious dump.
_ENTRIES_LIMIT = 500_000
_TENSORS_LIMIT = 4_096
_RANKS_LIMIT = 1_000_000
_NAME_LIMIT = 256

_PEERS = re.compile(r"^(send|recv) (\d+)(->|<-)(\d+)$")


@dataclass(frozen=True, slots=True)
class DumpGroup:
    """A process group. `ranks` are global, in the group's order; empty if no dump lists them."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Signature(msgspec.Struct, frozen=True, gc=False):
    """Properties of an operation that all participants must agree on."""

    op: str
    elements_in: int
    elements_out: int
    dtype: str | None


class Peers(msgspec.Struct, frozen=True, gc=False):
    """Sender and receiver as positions in the group; `sends`: whether this rank is the sender."""

    sender: int
    receiver: int
    sends: bool


class DumpEntry(msgspec.Struct, frozen=True, gc=False):
    """One operation that this rank has launched (enqueued)."""

    order: int  # position in this rank's own order of launches
    local_group: str  # the rank's own number of the group, the key of `pg_status`
    group: str
    description: str
    backend: str
    sequence: int  # number among its kind (collective or point-to-point) in the group
    sequences: tuple[int, int]  # both kinds; equal in one coalesced batch
    is_p2p: bool
    peers: Peers | None
    signature: Signature
    created_ns: int  # CLOCK_REALTIME of the rank's node
    started: bool
    completed: bool

    @property
    def is_collective(self) -> bool:
        return not self.is_p2p and self.peers is None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The last sequence numbers of one group. None: not known."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank. `groups` and `status` are keyed by the name of the group."""

    rank: int
    version: str
    entries: tuple[DumpEntry, ...]
    is_timed: bool  # whether it records when kernels start: NCCL does so only on request
    groups: Mapping[str, DumpGroup]
    status: Mapping[str, GroupStatus]


def dump_from(document: object, rank: int) -> Dump:
    """Check and simplify a loaded dump.

    Raises MalformedDumpError, whose message continues a sentence that begins with the file's name.
    """
    if not isinstance(document, dict) or not isinstance(document.get("entries", []), list):
        raise MalformedDumpError("is not a Flight Recorder dump: it has no entries")
    version = _version(document)
    raw = document.get("entries", [])
    if len(raw) > _ENTRIES_LIMIT:
        raise MalformedDumpError(f"has more than {_ENTRIES_LIMIT} entries")
    try:
        entries = [_entry(item, order) for order, item in enumerate(_by_record(raw))]
        groups = _groups(_mapping(document, "pg_config"))
        local_status = {str(k): _status(v) for k, v in _mapping(document, "pg_status").items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise MalformedDumpError(
            f"is not a Flight Recorder dump of version {version}: {type(error).__name__} in it"
        ) from error
    names = _local_names(entries, groups, local_status)
    status = {names[local]: known for local, known in local_status.items() if local in names}
    is_timed = any(map(_is_seen_started, raw))
    return Dump(rank, version, tuple(_with_final_state(entries, status)), is_timed, groups, status)


def _version(document: Mapping[Any, Any]) -> str:
    version = document.get("version")
    found = re.match(r"^2\.(\d{1,4})$", version) if isinstance(version, str) else None
    if found is None or int(found[1]) < 4:
        shown = version[:20] if isinstance(version, str) else None
        raise MalformedDumpError(
            f"is not a Flight Recorder dump of a known version: expected 2.4 to 2.10, found {shown}"
        )
    return found[0]


def _mapping(document: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise TypeError(key)
    return value


def _by_record(raw: list[Any]) -> list[Any]:
    return sorted(raw, key=lambda item: _number(item.get("record_id", 0)))


def _number(value: object) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str):  # the JSON form writes the numbers of `pg_status` as strings
        return int(value[:20])
    if not isinstance(value, int):
        raise TypeError("not a number")
    return int(value)


def _text(value: object) -> str:
    """Return a name from the dump that is safe to print.

    Other values are not converted: for lists that contain one list twice, `str` is exponential in
    their depth.
    """
    if not isinstance(value, str | int):
        raise TypeError("not a name")
    text = str(value)[:_NAME_LIMIT]
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def _entry(item: Mapping[str, Any], order: int) -> DumpEntry:
    local = _text(item.get("pg_id", ""))
    name, description = (*item.get("process_group", (local, "")), "")[:2]
    backend, _, op = _text(item["profiling_name"]).rpartition(":")
    is_p2p = bool(item.get("is_p2p", False))
    # NCCL also retires aborted operations; their state is correct.
    completed = item.get("state") == "completed" or (
        bool(item.get("retired")) and backend != "nccl"
    )
    sequences = _number(item["collective_seq_id"]), _number(item.get("p2p_seq_id", 0))
    return DumpEntry(
        order=order,
        local_group=local,
        group=_text(name),
        description=_text(description),
        backend=backend,
        sequence=sequences[is_p2p],
        sequences=sequences,
        is_p2p=is_p2p,
        peers=_peers(op),
        signature=_signature(item, "p2p" if is_p2p and _PEERS.match(op) else op),
        created_ns=_number(item.get("time_created_ns") or 0),
        started=completed or _is_seen_started(item),
        completed=completed,
    )


def _is_seen_started(item: Mapping[str, Any]) -> bool:
    return item.get("state") == "started" or bool(item.get("time_discovered_started_ns"))


def _peers(op: str) -> Peers | None:
    """Parse `send 0->1` or `recv 1<-0`; the rank itself is always on the left."""
    found = _PEERS.match(op)
    if found is None:
        return None
    own, other = int(found[2]), int(found[4])
    return Peers(own, other, True) if found[1] == "send" else Peers(other, own, False)


def _signature(item: Mapping[str, Any], op: str) -> Signature:
    dtypes = item.get("input_dtypes") or item.get("output_dtypes") or [None]
    return Signature(
        op=op,
        elements_in=_elements(item.get("input_sizes") or []),
        elements_out=_elements(item.get("output_sizes") or []),
        dtype=None if dtypes[0] is None else _text(dtypes[0]),
    )


def _elements(sizes: list[list[int]]) -> int:
    if len(sizes) > _TENSORS_LIMIT:
        raise ValueError("too many tensors")
    return sum(math.prod(map(_number, dimensions[:64])) for dimensions in sizes)


def _status(value: Mapping[str, Any]) -> GroupStatus:
    def last(what: str) -> int | None:
        sequence = _number(value.get(f"last_{what}_collective", -1))
        return None if sequence < 0 else sequence

    return GroupStatus(last("enqueued"), last("started"), last("completed"))


def _groups(config: Mapping[Any, Any]) -> dict[str, DumpGroup]:
    """Return the groups with a name; gloo writes one unnamed group, which is not usable."""
    groups = {}
    for key, value in config.items():
        name = _text(value.get("name", key))
        ranks = value.get("ranks") or []
        if isinstance(ranks, str):
            ranks = re.findall(r"\d+", ranks)
        if len(ranks) > _RANKS_LIMIT:
            raise ValueError("too many ranks")
        if name:
            members = tuple(_number(rank) for rank in ranks)
            if any(rank < 0 for rank in members):
                raise ValueError("a negative rank")
            groups[name] = DumpGroup(name, _text(value.get("desc", "")), members)
    return groups


def _local_names(
    entries: Iterable[DumpEntry], groups: Mapping[str, DumpGroup], status: Mapping[str, GroupStatus]
) -> dict[str, str]:
    """Return the name of each group by the rank's own number of it."""
    known = {entry.local_group: entry.group for entry in entries}
    if len(groups) == len(status) and all(n.isdecimal() for n in (*groups, *status)):
        paired = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True))
        # Entries confirm the order; if one of them contradicts it, the order is not used.
        if all(paired.get(local, name) == name for local, name in known.items()):
            return paired | known
    return known


def _with_final_state(
    entries: list[DumpEntry], status: Mapping[str, GroupStatus]
) -> list[DumpEntry]:
    """Return the entries with `completed` and `started` derived from the whole dump."""
    implied = _implied_completions(entries, status)
    batches = {_batch(e): e for e in entries if e.signature.op == "coalesced"}
    sizes = Counter(_batch(e) for e in entries if e.signature.op != "coalesced")
    batching = {group for group, _ in batches}
    batching |= {e.group for e in entries if e.is_p2p and sizes[_batch(e)] > 1}
    return [
        _settle(entry, implied, batches.get(_batch(entry)), entry.group in batching)
        for entry in entries
        # The entry of the batch has no information beyond that of its members.
        if entry.signature.op != "coalesced" or not sizes[_batch(entry)]
    ]


def _batch(entry: DumpEntry) -> tuple[str, tuple[int, int]]:
    return entry.group, entry.sequences


def _implied_completions(
    entries: list[DumpEntry], status: Mapping[str, GroupStatus]
) -> dict[str, int]:
    """Return by group the sequence number up to which NCCL has completed its collectives.

    One stream runs them in order. Messages use a stream for each pair and finish in any order.
    """
    implied: dict[str, int] = {}
    last: dict[str, DumpEntry] = {}
    for entry in entries:
        if entry.backend == "nccl":
            last[entry.group] = entry
            if entry.completed and not entry.is_p2p:
                implied[entry.group] = max(implied.get(entry.group, 0), entry.sequence)
    for name, entry in last.items():
        known = status.get(name)
        # The status counts the kind that was used last and contains nothing about the other.
        if known is None or entry.is_p2p or known.enqueued != entry.sequence:
            continue
        if known.completed is not None and known.completed <= entry.sequence:
            implied[name] = max(implied.get(name, 0), known.completed)
    return implied


def _settle(
    entry: DumpEntry, implied: Mapping[str, int], batch: DumpEntry | None, is_batching: bool
) -> DumpEntry:
    completed = (
        entry.completed
        or (not entry.is_p2p and entry.sequence <= implied.get(entry.group, 0))
        or (batch is not None and batch.completed)
        # A dump of active entries drops the entry of a finished batch, but not its members.
        or (entry.is_p2p and is_batching and batch is None)
    )
    started = entry.started or completed or (batch is not None and batch.started)
    if (started, completed) == (entry.started, entry.completed):
        return entry
    return msgspec.structs.replace(entry, completed=completed, started=started)
