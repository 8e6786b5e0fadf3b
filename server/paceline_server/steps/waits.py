"""Split each communication into waiting for the other participants and transferring.

Collectives need no clock: all participants leave together, so the rank with the shortest time in it
arrived last, and the wait of each other rank is its additional time. A transfer's wait ends when
its partner enters the matching call, which compares two nodes' clocks: a result outside the span is
clipped to it, so clock skew can misplace a wait but cannot create time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_server.steps.columns import CHUNK, Bools, Ints, Spans, one_of
from paceline_server.steps.groups import UNKNOWN, Groups
from paceline_server.steps.timing import CollectiveTimes, Floats, TransferTimes
from paceline_wire.spans import COLLECTIVE_OPS, RECEIVE_OPS, TRANSFER_OPS, Flag, Op

COLLECTIVES = frozenset(int(op) for op in COLLECTIVE_OPS)
TRANSFERS = frozenset(int(op) for op in TRANSFER_OPS)
RECEIVES = frozenset(int(op) for op in RECEIVE_OPS)
_LONGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class CommunicationTimes:
    """Waits and transfers of one step.

    `wait_ns`, per span: nanoseconds from its start until the last participant arrived. Zero for
    spans that are not communication and for collectives that cannot be matched; the whole duration
    for a receive whose send was not recorded. `routed`: spans of all-to-alls in which ranks
    received different sizes.
    """

    wait_ns: Ints
    routed: Ints
    collectives: CollectiveTimes
    transfers: TransferTimes


def communication(spans: Spans, groups: Groups) -> CommunicationTimes:
    """Match the collectives and transfers of one step. `spans` must be sorted by rank."""
    wait_ns = np.zeros(len(spans), dtype=np.int64)
    collectives, routed = _collectives(spans, groups, wait_ns)
    transfers = _transfers(spans, wait_ns)
    return CommunicationTimes(wait_ns, routed, collectives, transfers)


def _collectives(spans: Spans, groups: Groups, wait_ns: Ints) -> tuple[CollectiveTimes, Ints]:
    """Match the collectives; also fill in `wait_ns`, and return the spans of uneven all-to-alls."""
    where = np.flatnonzero(one_of(spans.op, COLLECTIVES) & (spans.sequence > 0))
    key = groups.keys(spans.rank[where], spans.group[where])
    known = key != UNKNOWN
    where, key = where[known], key[known]
    sequence = spans.sequence[where]
    order = np.lexsort((sequence, key))
    where, key, sequence = where[order], key[order], sequence[order]
    first = _firsts((key[1:] != key[:-1]) | (sequence[1:] != sequence[:-1]), where.size)
    if not first.size:
        none, no_time = np.empty(0, dtype=np.int64), np.empty(0)
        return CollectiveTimes(none, none, none, none, none, none, no_time, no_time), none
    # WAIT spans are only the host's share of an async call, not its duration.
    whole = (spans.flags[where] & Flag.WAIT) == 0
    duration = spans.duration_ns[where]
    length = np.where(whole, duration, _LONGEST)
    shortest = np.minimum.reduceat(length, first)
    participants = np.add.reduceat(whole.astype(np.int64), first)
    sizes = np.diff(np.r_[first, where.size])
    matched = participants > 1
    transfer = np.repeat(np.where(matched, shortest, _LONGEST), sizes)
    wait_ns[where] = np.maximum(duration - transfer, 0)
    longest = np.maximum.reduceat(np.where(whole, duration, 0), first)
    size = np.maximum.reduceat(spans.bytes[where], first)
    rank = np.where(whole & (duration == transfer), spans.rank[where], _LONGEST)
    last = np.minimum.reduceat(rank, first)
    times = CollectiveTimes(
        group=key[first][matched],
        op=spans.op[where][first][matched],
        sequence=sequence[first][matched],
        bytes=size[matched],
        participants=participants[matched],
        last_rank=last[matched],
        transfer_seconds=shortest[matched] / 1e9,
        spread_seconds=(longest - shortest)[matched] / 1e9,
    )
    smallest = np.minimum.reduceat(spans.bytes[where], first)
    uneven = matched & (spans.op[where][first] == Op.ALL_TO_ALL) & (smallest < size)
    return times, where[np.repeat(uneven, sizes) & whole]


class _End:
    """All sending or all receiving ends of the step's transfers."""

    def __init__(self, spans: Spans, chosen: Bools, source: Ints, destination: Ints) -> None:
        self.where: Ints = np.flatnonzero(chosen)
        # 20 bits for each rank of a pair, 23 of the sequence: enough for one step.
        self.key: Ints = (
            (source[self.where] & 0xFFFFF) << 43
            | (destination[self.where] & 0xFFFFF) << 23
            | (spans.sequence[self.where] & 0x7FFFFF)
        )
        order = np.argsort(self.key, kind="stable")
        keys, where = self.key[order], self.where[order]
        first = _firsts(keys[1:] != keys[:-1], keys.size)
        is_wait = (spans.flags[where] & Flag.WAIT) != 0
        # One row per transfer, in ascending order of keys:
        self.keys: Ints = keys[first]
        self.entered_ns: Ints = _least(spans.start_ns[where], first)  # async: when it was launched
        self.whole: Ints = _least(
            np.where(is_wait, _LONGEST, where), first
        )  # the span of its WAIT, if recorded
        self.waited: Bools = _least((~is_wait).astype(np.int64), first) == 0
        held = (spans.flags[where] & Flag.ASYNC) == 0
        self.left_ns: Ints = _greatest(
            np.where(held, spans.end_ns[where], spans.start_ns[where]), first
        )

    def __len__(self) -> int:
        return int(self.keys.size)

    def place(self, keys: Ints) -> tuple[Ints, Bools]:
        """Return the rows of the transfers with these keys, and which of them exist."""
        if not len(self):
            return np.zeros(keys.size, dtype=np.int64), np.zeros(keys.size, dtype=np.bool_)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self) - 1)
        return place, self.keys[place] == keys


def _transfers(spans: Spans, wait_ns: Ints) -> TransferTimes:
    """Match the ends by (source, destination, sequence); also fill in `wait_ns`."""
    chosen = one_of(spans.op, TRANSFERS) & (spans.sequence > 0) & (spans.peer >= 0)
    receiving = one_of(spans.op, RECEIVES)
    send = _End(spans, chosen & ~receiving, spans.rank, spans.peer)
    receive = _End(spans, chosen & receiving, spans.peer, spans.rank)
    for end, partner in ((send, receive), (receive, send)):
        start, duration = spans.start_ns[end.where], spans.duration_ns[end.where]
        place, known = partner.place(end.key)
        # A receive whose send was lost is all waiting; a send without a receive does not wait.
        wait = duration if end is receive else np.zeros_like(duration)
        pending = partner.entered_ns[place[known]]
        wait[known] = np.clip(pending - start[known], 0, duration[known])
        wait_ns[end.where] = wait
    place, known = receive.place(send.keys)
    place = place[known]
    sent, received, waited = send.whole[known], receive.whole[place], receive.waited[place]
    both = (sent != _LONGEST) & (received != _LONGEST)
    left_ns = send.left_ns[known]
    return _transfer_times(spans, sent[both], left_ns[both], received[both], waited[both])


def _transfer_times(
    spans: Spans, sent: Ints, left_ns: Ints, received: Ints, waited: Bools
) -> TransferTimes:
    return TransferTimes(
        source=spans.rank[sent],
        destination=spans.rank[received],
        op=spans.op[sent],
        microbatch=spans.microbatch[sent],
        chunk=spans.row(CHUNK)[sent],
        bytes=np.maximum(spans.bytes[sent], spans.bytes[received]),
        send_start_ns=spans.start_ns[sent],
        send_end_ns=left_ns,
        receive_start_ns=spans.start_ns[received],
        end_ns=spans.end_ns[received],
        transfer_seconds=_transfer_seconds(spans, sent, received, waited),
    )


def _transfer_seconds(spans: Spans, sent: Ints, received: Ints, waited: Bools) -> Floats:
    """Return the time of each transfer after both ends had entered it.

    For two blocking calls it is the shorter duration, because the rank that enters last only
    transfers. The recorded end of an async send may be much later than the real one; then the
    receiver's time after both had begun is used, limited by the duration of both calls. An async
    receive that no rank waited for has no recorded end and counts as 0.
    """
    limit = np.minimum(spans.duration_ns[sent], spans.duration_ns[received])
    begun = np.maximum(spans.start_ns[sent], spans.start_ns[received])
    seen = np.clip(spans.end_ns[received] - begun, 0, limit)
    seen[((spans.flags[received] & Flag.ASYNC) != 0) & ~waited] = 0
    launched = (spans.flags[sent] & Flag.ASYNC) != 0
    seconds: Floats = np.where(launched, seen, limit) / 1e9
    return seconds


def _firsts(changes: Bools, count: int) -> Ints:
    """Return the index at which each run of equal rows begins."""
    found: Ints = np.flatnonzero(np.r_[np.full(min(count, 1), True), changes])
    return found


def _least(values: Ints, first: Ints) -> Ints:
    """Return the minimum of each run."""
    least: Ints = np.minimum.reduceat(values, first) if first.size else values
    return least


def _greatest(values: Ints, first: Ints) -> Ints:
    """Return the maximum of each run."""
    greatest: Ints = np.maximum.reduceat(values, first) if first.size else values
    return greatest
