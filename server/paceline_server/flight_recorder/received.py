"""Dumps that agents requested from running ranks: decode them, and conclude if they are
complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline_server.flight_recorder.dump import Dump, dump_from
from paceline_server.flight_recorder.errors import FlightRecorderError
from paceline_server.flight_recorder.folder import load
from paceline_server.flight_recorder.report import HangReport, analyze
from paceline_wire.batch import RankDump
from paceline_wire.dumps import unpack


@dataclass(frozen=True, slots=True)
class Received:
    """The dump of one rank, or the reason why there is none.

    `was_asked`: the rank was asked to write one and did not, for example because its host hangs.
    """

    dump: Dump | None
    error: str | None = None
    was_asked: bool = False


def read(event: RankDump) -> Received:
    if event.error is not None:
        return Received(None, event.error, event.was_asked)
    try:
        return Received(dump_from(load(unpack(event.content)), event.rank))
    except (FlightRecorderError, ValueError) as error:
        return Received(None, f"the dump of rank {event.rank} {error}")


def conclude(
    received: Mapping[int, Received], expected: Collection[int]
) -> tuple[HangReport | None, str]:
    """Return the report (None without one) and a sentence about it.

    A rank without a dump counts as hung on its host only if it was asked to write one. If
    anything else is missing, there is no report.
    """
    dumps = {rank: one.dump for rank, one in received.items() if one.dump is not None}
    errors = {rank: one.error for rank, one in received.items() if one.error is not None}
    unknown = [rank for rank in expected if rank not in received]
    unknown += [rank for rank in errors if not received[rank].was_asked]
    if not dumps:
        reasons = Counter(errors.values()).most_common(1)
        why = reasons[0][0] if reasons else "no rank has responded"
        return None, f"No Flight Recorder dump: {why}."
    if unknown:
        why = errors.get(min(unknown)) or f"rank {min(unknown)} has not responded"
        return None, (
            f"Flight Recorder dumps of {len(dumps)} of {len(expected)} ranks, "
            f"too few to conclude from: {why}."
        )
    found = analyze(dumps, expected=expected)
    return found, f"Flight Recorder, {len(dumps)} dumps: {found.verdict}"
