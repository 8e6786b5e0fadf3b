"""Ranks that entered different collectives, found after gloo aborted a rank.

gloo aborts the rank that receives more bytes than its collective expects, which is rarely the rank
to blame. Ranks may have entered later collectives before the abort ended them, so those in which
the aborted rank was are looked up in the records as well as on the state pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from msgspec import structs

from paceline_server.detect.hang.culprit import find_culprits
from paceline_server.detect.hang.step_program import RankProgram, program_of
from paceline_server.detect.hang.verdict import HangVerdict, mismatch_verdict
from paceline_server.detect.hang.wait_for_graph import BlockReason, blocked_operations
from paceline_server.detect.observation import Observation
from paceline_wire.ring import Frame, GroupProgress, StateView
from paceline_wire.spans import COLLECTIVE_OPS, Span

_MAX_RANKS_READ = 64  # decoding the records of one rank takes some milliseconds

_Entered = Mapping[int, GroupProgress]  # by rank: how it entered one collective


def mismatched_collective(aborted: int, observation: Observation) -> HangVerdict | None:
    """Return the ranks that entered another collective, or size, than the others.

    Args:
        aborted: The rank that gloo aborted.
        observation: The current tick.

    Returns:
        None if pages and records show no difference.
    """
    pages = {
        rank: live.state.view for rank, live in observation.ranks.items() if live.state is not None
    }
    in_flight = pages[aborted].groups if aborted in pages else []
    for progress in in_flight:
        key = observation.groups.key(aborted, progress.group)
        if key is None or progress.left >= progress.entered:
            continue
        spans = _records(observation.groups.members(key), observation)
        for entered in _collectives(key, progress.left, pages, spans, observation):
            verdict = _verdict(entered, pages, spans, observation)
            if verdict is not None:
                return verdict
    return None


def _records(members: tuple[int, ...], observation: Observation) -> dict[int, list[Span]]:
    records = observation.records
    read = () if records is None else members[:_MAX_RANKS_READ]
    return {rank: records.of(rank) for rank in read if records is not None}


def _collectives(
    key: int,
    left: int,
    pages: Mapping[int, StateView],
    spans: Mapping[int, list[Span]],
    observation: Observation,
) -> Iterator[_Entered]:
    """Yield the collectives of the group after number `left`, in order."""
    by_sequence: dict[int, dict[int, GroupProgress]] = {}

    def add(rank: int, progress: GroupProgress) -> None:
        if progress.entered > left and observation.groups.key(rank, progress.group) == key:
            by_sequence.setdefault(progress.entered, {}).setdefault(rank, progress)

    for rank, page in pages.items():
        for progress in page.groups:
            add(rank, progress)
    for rank, records in spans.items():
        for span in records:
            if span.op in COLLECTIVE_OPS and span.sequence:
                number, start_ns = span.sequence, span.start_ns
                add(rank, GroupProgress(span.group, number, 0, start_ns, span.op, span.bytes))
    for sequence in sorted(by_sequence):
        yield by_sequence[sequence]


def _verdict(
    entered: _Entered,
    pages: Mapping[int, StateView],
    spans: Mapping[int, list[Span]],
    observation: Observation,
) -> HangVerdict | None:
    """Return the verdict on one collective, as if all ranks were still in it."""
    views = {
        rank: structs.replace(pages[rank], frames=[_frame(own)], groups=[own], peers=[])
        for rank, own in entered.items()
        if rank in pages
    }

    @cache
    def program(rank: int) -> RankProgram | None:
        before = [span for span in spans.get(rank, ()) if span.end_ns <= entered[rank].entered_ns]
        return program_of(rank, before, observation.groups)

    blocked = blocked_operations(views, observation.groups, program)
    if not any(operation.reason is BlockReason.MISMATCH for operation in blocked):
        return None
    culprits = find_culprits(views, observation.groups, program)
    if culprits is None or culprits.side != "mismatch":
        return None
    alone = replace(culprits, dependents=frozenset())  # nobody waits any more
    return mismatch_verdict(alone, views, [], [], observation)


def _frame(entered: GroupProgress) -> Frame:
    return Frame(entered.op, entered.entered_ns, entered.group, None, entered.entered)
