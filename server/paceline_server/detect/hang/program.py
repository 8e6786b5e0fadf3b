"""What a rank does in each step, in which order; and whether it has now departed from that.

A training step is a program that repeats: the same communications in the same order. A rank that
left one out, or did two in another order, is found by comparing where it stands with its own last
whole step. This also decides between two ranks that wait for each other, where no vote can.
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
    """A stream of numbered communications: of a group (its key), to or from a peer (its rank)."""

    kind: Literal["group", "send", "receive"]
    number: int


@dataclass(frozen=True, slots=True)
class ProgramCommunication:
    """One communication of the program. `bytes` 0: not known."""

    channel: ProgramChannel
    sequence: int
    op: int
    bytes: int


class RankProgram:
    """One rank's last whole step; it is taken for all that follow."""

    def __init__(self, step: int, communications: Sequence[ProgramCommunication]) -> None:
        self.step = step
        self.sizes: dict[tuple[ProgramChannel, int], int] = {}  # of the newest by channel and op
        self._order = communications
        self._counts = Counter(each.channel for each in communications)
        self._last = {each.channel: each.sequence for each in communications}
        self._places: dict[ProgramChannel, list[int]] = {}
        for place, each in enumerate(communications):
            self._places.setdefault(each.channel, []).append(place)

    def repeats(self, earlier: RankProgram) -> RankProgram | None:
        """This step, if the earlier one was like it; sizes that have changed are not known."""
        if [(each.channel, each.op) for each in self._order] != [
            (each.channel, each.op) for each in earlier._order
        ]:
            return None
        pairs = zip(self._order, earlier._order, strict=True)
        return RankProgram(
            self.step,
            [now if now.bytes == then.bytes else replace(now, bytes=0) for now, then in pairs],
        )

    def expected(self, channel: ProgramChannel, sequence: int) -> ProgramCommunication | None:
        """What the rank would do as this number of this channel, if it does as before."""
        found = self._place(channel, sequence)
        return None if found is None else self._order[found[1]]

    def departures(
        self, channel: ProgramChannel, sequence: int, entered: dict[ProgramChannel, int]
    ) -> dict[ProgramChannel, int] | None:
        """Having just entered this one, how many more (or fewer) others it entered than ever.

        None: the program does not know this one.
        """
        found = self._place(channel, sequence)
        if found is None:
            return None
        laps, place = found
        before = Counter(each.channel for each in self._order[: place + 1])
        differences = {}
        for other, count in self._counts.items():
            expected = self._last[other] + laps * count + before[other]
            if other in entered and entered[other] != expected:
                differences[other] = entered[other] - expected
        return differences

    def _place(self, channel: ProgramChannel, sequence: int) -> tuple[int, int] | None:
        """(whole steps in between, place in the order)."""
        places = self._places.get(channel)
        if places is None or sequence <= self._last[channel]:
            return None
        laps, index = divmod(sequence - self._last[channel] - 1, len(places))
        return laps, places[index]


def program_of(rank: int, spans: Sequence[Span], groups: Groups) -> RankProgram | None:
    """The newest step that was like the one before; a single known one is believed.

    None: too little is known, or no two steps are alike. (The newest may be incomplete: what ran
    on a device is recorded at later step boundaries.)
    """
    ended = sorted({span.step for span in spans if span.op == Op.STEP})
    whole = [step for step in ended if step - 1 in ended]
    programs = [_step_program(rank, step, spans, groups) for step in whole[-4:]]
    for later, earlier in zip(programs[::-1], programs[-2::-1], strict=False):
        if later is not None and earlier is not None:
            repeated = later.repeats(earlier)
            if repeated is not None:
                return _sized(repeated, rank, spans, groups)
    only = programs[0] if len(programs) == 1 else None
    return None if only is None else _sized(only, rank, spans, groups)


def _sized(program: RankProgram, rank: int, spans: Iterable[Span], groups: Groups) -> RankProgram:
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
        known = first.get((channel, span.sequence))
        if known is None or span.start_ns < known.start_ns:  # a WAIT span has the launch's number
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
    """Numbers in their order, none lost. (A program that launches out of order cannot be.)"""
    newest: dict[ProgramChannel, int] = {}
    for each in communications:
        if newest.get(each.channel, each.sequence - 1) != each.sequence - 1:
            return False
        newest[each.channel] = each.sequence
    return bool(communications)


def entered(rank: int, view: StateView, groups: Groups) -> dict[ProgramChannel, int]:
    """How many communications of each channel the rank has entered."""
    found: dict[ProgramChannel, int] = {}
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        if key is not None:
            channel = ProgramChannel("group", key)
            found[channel] = max(progress.entered, found.get(channel, 0))
    for peer in view.peers:
        found[ProgramChannel("send", peer.peer)] = peer.send_entered
        found[ProgramChannel("receive", peer.peer)] = peer.recv_entered
    return found


def newest(rank: int, view: StateView, groups: Groups) -> list[tuple[ProgramChannel, int]]:
    """The communication entered last, with its number; of a peer it may be either direction."""
    moments: list[tuple[int, list[tuple[ProgramChannel, int]]]] = []
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        if key is not None:
            place = (ProgramChannel("group", key), progress.entered)
            moments.append((progress.entered_ns, [place]))
    for peer in view.peers:
        either = [
            (ProgramChannel("send", peer.peer), peer.send_entered),
            (ProgramChannel("receive", peer.peer), peer.recv_entered),
        ]
        moments.append((peer.entered_ns, [place for place in either if place[1]]))
    return max(moments, key=lambda moment: moment[0], default=(0, []))[1]


def departs(
    program: RankProgram, rank: int, view: StateView, groups: Groups
) -> dict[ProgramChannel, int]:
    """How the rank's counts differ from its own program; empty: they do not.

    A difference of 0: as many, but the newest is another operation, or of another size.
    """
    counts = entered(rank, view, groups)
    answers = [
        program.departures(channel, number, counts)
        for channel, number in newest(rank, view, groups)
    ]
    found = min((each for each in answers if each is not None), key=len, default={})
    for progress in view.groups:
        key = groups.key(rank, progress.group)
        before = (
            None
            if key is None
            else program.expected(ProgramChannel("group", key), progress.entered)
        )
        if before is not None and (
            before.op != progress.op or 0 < before.bytes != progress.bytes > 0
        ):
            found.setdefault(before.channel, 0)
    return found
