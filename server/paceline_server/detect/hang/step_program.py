"""The step program: the communications that a rank repeats in every step, in order.

A rank that skipped one, or entered two in another order, is found by comparing its counts with its
own last complete step. This also finds the culprit of two ranks that wait for each other, where no
majority exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from paceline_server.steps.groups import Groups
from paceline_wire.ring import StateView
from paceline_wire.spans import COMMUNICATION_OPS, RECEIVE_OPS, Op, Span


class ProgramChannel(NamedTuple):
    """A sequence of numbered communications: `number` is a group's key or a peer's rank."""

    kind: Literal["group", "send", "receive"]
    number: int


@dataclass(frozen=True, slots=True)
class ProgramCommunication:
    """One communication of the program. `bytes` is 0 if it is not known."""

    channel: ProgramChannel
    sequence: int
    op: int
    bytes: int


class RankProgram:
    """The last complete step of one rank, taken as the program of the steps that follow."""

    def __init__(self, step: int, communications: Sequence[ProgramCommunication]) -> None:
        self.step = step
        # Payload bytes of the newest communication, by channel and op.
        self.sizes: dict[tuple[ProgramChannel, int], int] = {}
        self._order = communications
        self._counts = Counter(item.channel for item in communications)
        self._last = {item.channel: item.sequence for item in communications}
        self._places: dict[ProgramChannel, list[int]] = {}
        for place, item in enumerate(communications):
            self._places.setdefault(item.channel, []).append(place)

    def common_with(self, earlier: RankProgram) -> RankProgram | None:
        """Return this step, with sizes set to 0 where they differ; None if the order differs."""
        if [(item.channel, item.op) for item in self._order] != [
            (item.channel, item.op) for item in earlier._order
        ]:
            return None
        pairs = zip(self._order, earlier._order, strict=True)
        return RankProgram(
            self.step,
            [now if now.bytes == then.bytes else replace(now, bytes=0) for now, then in pairs],
        )

    def expected(self, channel: ProgramChannel, sequence: int) -> ProgramCommunication | None:
        """Return the communication with this number if the rank follows its program."""
        position = self._position(channel, sequence)
        return None if position is None else self._order[position[1]]

    def includes(self, channel: ProgramChannel) -> bool:
        """Return whether the rank communicates on this channel in each step."""
        return channel in self._counts

    def departures(
        self, channel: ProgramChannel, sequence: int, entered: dict[ProgramChannel, int]
    ) -> dict[ProgramChannel, int] | None:
        """Return, per channel, how many more communications the rank entered than its program has.

        `channel` and `sequence` name the newest communication. None: the communication is not in
        the program.
        """
        position = self._position(channel, sequence)
        if position is None:
            return None
        steps, place = position
        before = Counter(item.channel for item in self._order[: place + 1])
        differences = {}
        for other, count in self._counts.items():
            expected = self._last[other] + steps * count + before[other]
            if other in entered and entered[other] != expected:
                differences[other] = entered[other] - expected
        return differences

    def _position(self, channel: ProgramChannel, sequence: int) -> tuple[int, int] | None:
        """Return (complete steps since the program's step, position in the order)."""
        places = self._places.get(channel)
        if places is None or sequence <= self._last[channel]:
            return None
        steps, index = divmod(sequence - self._last[channel] - 1, len(places))
        return steps, places[index]


def program_of(rank: int, spans: Sequence[Span], groups: Groups) -> RankProgram | None:
    """Return the newest step that equals the one before it, or the only complete step.

    None: there are too few records, or no two steps are equal. The newest step may be incomplete,
    because device times are recorded at a later step boundary.
    """
    finished = sorted({span.step for span in spans if span.op == Op.STEP})
    complete = [step for step in finished if step - 1 in finished]
    programs = [_step_program(rank, step, spans, groups) for step in complete[-4:]]
    for later, earlier in zip(programs[::-1], programs[-2::-1], strict=False):
        if later is not None and earlier is not None:
            common = later.common_with(earlier)
            if common is not None:
                return _with_sizes(common, rank, spans, groups)
    only = programs[0] if len(programs) == 1 else None
    return None if only is None else _with_sizes(only, rank, spans, groups)


def _with_sizes(
    program: RankProgram, rank: int, spans: Iterable[Span], groups: Groups
) -> RankProgram:
    for span in spans:
        if span.op in COMMUNICATION_OPS and span.sequence and span.bytes:
            channel = _channel(rank, span, groups)
            if channel is not None:
                program.sizes[channel, span.op] = span.bytes
    return program


def _step_program(
    rank: int, step: int, spans: Iterable[Span], groups: Groups
) -> RankProgram | None:
    first: dict[tuple[ProgramChannel, int], Span] = {}
    for span in spans:
        if span.step != step or span.op not in COMMUNICATION_OPS or not span.sequence:
            continue
        channel = _channel(rank, span, groups)
        if channel is None:
            continue
        earliest = first.get((channel, span.sequence))
        # A WAIT span has the same number as the launch.
        if earliest is None or span.start_ns < earliest.start_ns:
            first[channel, span.sequence] = span
    order = sorted(first.items(), key=lambda item: item[1].start_ns)
    communications = [
        ProgramCommunication(channel, sequence, span.op, span.bytes)
        for (channel, sequence), span in order
    ]
    return RankProgram(step, communications) if _is_gapless(communications) else None


def _channel(rank: int, span: Span, groups: Groups) -> ProgramChannel | None:
    if span.peer is not None:
        return ProgramChannel("receive" if span.op in RECEIVE_OPS else "send", span.peer)
    key = groups.key(rank, span.group)
    return None if key is None else ProgramChannel("group", key)


def _is_gapless(communications: Sequence[ProgramCommunication]) -> bool:
    """Return whether no number is missing or out of order."""
    newest: dict[ProgramChannel, int] = {}
    for item in communications:
        if newest.get(item.channel, item.sequence - 1) != item.sequence - 1:
            return False
        newest[item.channel] = item.sequence
    return bool(communications)


def entered_counts(rank: int, view: StateView, groups: Groups) -> dict[ProgramChannel, int]:
    """Return how many communications of each channel the rank has entered."""
    counts: dict[ProgramChannel, int] = {}
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        if key is not None:
            channel = ProgramChannel("group", key)
            counts[channel] = max(progress.entered, counts.get(channel, 0))
    for peer in view.peers:
        counts[ProgramChannel("send", peer.peer)] = peer.send_entered
        counts[ProgramChannel("receive", peer.peer)] = peer.recv_entered
    return counts


def newest_communications(
    rank: int, view: StateView, groups: Groups
) -> list[tuple[ProgramChannel, int]]:
    """Return the communication entered last, with its number; for a peer, both directions."""
    entries: list[tuple[int, list[tuple[ProgramChannel, int]]]] = []
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        if key is not None:
            place = (ProgramChannel("group", key), progress.entered)
            entries.append((progress.entered_ns, [place]))
    for peer in view.peers:
        either = [
            (ProgramChannel("send", peer.peer), peer.send_entered),
            (ProgramChannel("receive", peer.peer), peer.recv_entered),
        ]
        entries.append((peer.entered_ns, [place for place in either if place[1]]))
    return max(entries, key=lambda entry: entry[0], default=(0, []))[1]


def communications_outside(
    program: RankProgram, rank: int, view: StateView, groups: Groups
) -> dict[ProgramChannel, int]:
    """Return {channel: 1} if the rank's newest communication is on one that its program lacks."""
    newest = newest_communications(rank, view, groups)
    if not newest or any(program.includes(channel) for channel, _ in newest):
        return {}
    return {channel: 1 for channel, _ in newest}


def departures_from(
    program: RankProgram, rank: int, view: StateView, groups: Groups
) -> dict[ProgramChannel, int]:
    """Return, per channel, by how much the rank's count differs from its own program.

    Empty if no count differs. A difference of 0 means that the count is right, but the newest
    communication is another operation or has another size.
    """
    counts = entered_counts(rank, view, groups)
    candidates = [
        program.departures(channel, number, counts)
        for channel, number in newest_communications(rank, view, groups)
    ]
    departures = min((item for item in candidates if item is not None), key=len, default={})
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        expected = (
            None
            if key is None
            else program.expected(ProgramChannel("group", key), progress.entered)
        )
        if expected is not None and (
            expected.op != progress.op or 0 < expected.bytes != progress.bytes > 0
        ):
            departures.setdefault(expected.channel, 0)
    return departures
