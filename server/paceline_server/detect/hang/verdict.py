"""The verdict on a hang: who, on which side, stuck in what, on what evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from paceline_server.detect.finding import Evidence, Side
from paceline_server.detect.hang.blame import Blame
from paceline_server.detect.hang.operations import operation_text
from paceline_server.detect.hang.program import ProgramChannel
from paceline_server.detect.hang.stuck import (
    BUSY_GPU,
    IDLE_GPU,
    gpu_utilization,
    host_cause,
    operation_of,
    process_cause,
    ranks_text,
    standing_evidence,
)
from paceline_server.detect.hang.waiting import BlockedOperation, BlockReason, communication_frames
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_wire.ring import StateView
from paceline_wire.spans import op_name

_CULPRITS_READ = 3  # whose Python stacks are taken
_MISMATCH = "mismatched collective"
_BEFORE = "than at this point of its steps before"


@dataclass(frozen=True, slots=True)
class HangCulprit:
    """`ranks`: the culprits, or (`is_single` False) all in the communication that does not end."""

    ranks: tuple[int, ...]
    cause: str
    side: Side
    evidence: Sequence[Evidence]
    counter_evidence: Sequence[Evidence] = ()
    is_single: bool = True  # the first of `ranks` is to blame
    link: tuple[int, int] | None = None
    stacks_wanted: Sequence[int] = field(default=())


def stopped_culprit(
    stopped: Sequence[LiveRank], views: Mapping[int, StateView], seen: Observation
) -> HangCulprit:
    """Processes that cannot run, and that all others have come to wait for."""
    cause, evidence = process_cause(stopped[0]) or ("unknown", [])
    ranks = tuple(rank.rank for rank in stopped)
    if len(ranks) > 1:
        evidence = [Evidence(f"{ranks_text(ranks)} are stopped or gone"), *evidence]
    witness = [rank for rank in views if rank not in ranks][:1]
    return HangCulprit(
        ranks,
        cause,
        "host",
        [*evidence, *standing_evidence(views, seen)],
        stacks_wanted=[*ranks[:_CULPRITS_READ], *witness],
    )


def culprit_of(
    found: Blame | None,
    live: Mapping[int, LiveRank],
    unseen: frozenset[int],
    seen: Observation,
    generation: Generation,
) -> HangCulprit:
    """Put a blame into words. `unseen`: ranks that have no page, though their node speaks."""
    views = {rank: one.state.view for rank, one in live.items() if one.state}
    where = standing_evidence(views, seen) if len(views) > 1 else []
    if unseen:
        where.append(Evidence(f"{ranks_text(unseen)} show no state page"))
    if found is None:
        return _all_in_host_code(live, where, seen, generation)
    if found.side == "device":
        return _in_communication(found, views, where, seen, generation)
    witness = _witness(found)
    if found.side == "mismatch":
        return _mismatch(found, views, where, witness, seen)
    rank = found.ranks[0]
    cause, evidence = "process gone", [Evidence(f"rank {rank} shows no state page")]
    if rank in live:
        cause, evidence = host_cause(live[rank], seen, generation)
    elif rank in seen.exited:
        cause, evidence = "ended early", [Evidence(f"rank {rank} has exited with code 0")]
    return HangCulprit(
        found.ranks,
        cause,
        "host",
        [*evidence, *_waited_for(found), *where],
        _stuck_as_well(found, views),
        stacks_wanted=[*found.ranks[:_CULPRITS_READ], *witness],
    )


def _all_in_host_code(
    live: Mapping[int, LiveRank],
    where: list[Evidence],
    seen: Observation,
    generation: Generation,
) -> HangCulprit:
    """Nobody waits for anybody, as far as the pages show."""
    first = min(live)
    cause, evidence = host_cause(live[first], seen, generation)
    places = {operation_of(rank, one.state.view, seen) for rank, one in live.items() if one.state}
    if len(live) > 1 and len(places) == 1:
        evidence = [Evidence("all ranks are at the same place, and none waits for another")]
    return HangCulprit(
        (first,) if len(live) == 1 else tuple(sorted(live)),
        cause,
        "host",
        [*evidence, *where],
        is_single=len(live) == 1,
        stacks_wanted=sorted(live)[:2],
    )


def _in_communication(
    found: Blame,
    views: Mapping[int, StateView],
    where: list[Evidence],
    seen: Observation,
    generation: Generation,
) -> HangCulprit:
    """Launched by all its members, never completed. A device at rest has not begun it."""
    wait = found.waits[0] if found.waits else None
    if wait is None:
        members = found.ranks
        cause = "stuck on the device: launched, never completed"
        text = f"{ranks_text(members)} have launched the same communications, and none ends"
        evidence = [Evidence(text), *_waited_for(found)]
    else:
        members = tuple(sorted(set(wait.members)))
        operation = operation_text(wait.rank, wait.frame, seen.groups, seen.sections)
        cause = f"stuck in communication: {operation}"
        evidence = [Evidence(f"all participants have entered it: {ranks_text(members)}")]
    busy = {rank: gpu_utilization(rank, seen, generation) for rank in members}
    told = {rank: share for rank, share in busy.items() if share is not None}
    idle = [rank for rank, share in told.items() if share <= IDLE_GPU]
    at_work = [rank for rank, share in told.items() if share >= BUSY_GPU]
    link = None
    if wait is not None and wait.channel is not None and wait.channel.kind != "group":
        receives = wait.channel.kind == "receive"
        link = (wait.channel.number, wait.rank) if receives else (wait.rank, wait.channel.number)
    is_single = len(idle) == 1 and len(at_work) == len(members) - 1 > 0
    if is_single:
        text = f"the device of rank {idle[0]} is idle, those of all other participants spin in it"
        evidence.insert(0, Evidence(text, "DCGM_FI_DEV_GPU_UTIL", told[idle[0]], BUSY_GPU))
    return HangCulprit(
        (idle[0], *(rank for rank in members if rank != idle[0])) if is_single else members,
        cause,
        "device",
        [*evidence, *where],
        [Evidence("no participant's host is stuck elsewhere")],
        is_single=is_single,
        link=link,
        stacks_wanted=idle[:1] + [rank for rank in members if rank not in idle[:1]][:1],
    )


def _mismatch(
    found: Blame,
    views: Mapping[int, StateView],
    where: list[Evidence],
    witness: list[int],
    seen: Observation,
) -> HangCulprit:
    wanted = [*found.ranks[:_CULPRITS_READ], *witness]
    if found.circle:
        rings = "; ".join(
            f"rank {wait.rank} waits for {ranks_text(wait.targets)}" for wait in found.waits[:8]
        )
        if not found.ranks:
            ranks = tuple(sorted(found.circle))
            cause = "deadlock: ranks wait for each other"
            evidence = [Evidence(rings), *where]
            return HangCulprit(
                ranks, cause, "mismatch", evidence, is_single=False, stacks_wanted=ranks[:2]
            )
        departures = [*chain.from_iterable(_departures(rank, found, seen) for rank in found.ranks)]
        cause = _circle_cause(found, seen)
        evidence = [*departures, Evidence(rings), *where]
        return HangCulprit(found.ranks, cause, "mismatch", evidence, stacks_wanted=wanted)
    wait = next(wait for wait in found.waits if wait.reason is BlockReason.MISMATCH)
    odd = [rank for rank in found.ranks if rank in wait.members]
    others = [rank for rank in wait.members if rank not in odd and rank in views]
    told = [
        Evidence(f"{ranks_text([rank])} entered {_entered_text(rank, wait, views, seen)}")
        for rank in (*odd[:4], *others[:2])
    ]
    is_single = set(odd) != set(wait.members)
    name = "operation" if _ops(odd, wait, views, seen) - _ops(others, wait, views, seen) else "size"
    return HangCulprit(
        found.ranks,
        f"{_MISMATCH}: another {name if is_single else 'one on each rank'}",
        "mismatch",
        [*told, *_waited_for(found), *where],
        is_single=is_single,
        stacks_wanted=wanted,
    )


def _circle_cause(found: Blame, seen: Observation) -> str:
    """What the first culprit did in another order, or not at all."""
    changes = found.departures.get(found.ranks[0], {})
    behind = [channel for channel, difference in changes.items() if difference <= 0]
    if behind:
        return f"{_MISMATCH}: {_channel_text(behind[0], seen)} left out or overtaken"
    return f"{_MISMATCH}: order differs from the other ranks'"


def _departures(rank: int, found: Blame, seen: Observation) -> list[Evidence]:
    return [
        Evidence(f"rank {rank} {_departure(difference)} {_channel_text(channel, seen)} {_BEFORE}")
        for channel, difference in found.departures.get(rank, {}).items()
    ]


def _departure(difference: int) -> str:
    if not difference:
        return "has entered another operation or size as its newest of the"
    return f"has entered {abs(difference)} {'fewer' if difference < 0 else 'more'} of"


def _channel_text(channel: ProgramChannel, seen: Observation) -> str:
    if channel.kind == "group":
        return f"collectives of {seen.groups.name_of(channel.number)}"
    return f"{'sends to' if channel.kind == 'send' else 'receives from'} rank {channel.number}"


def _entered_text(
    rank: int, wait: BlockedOperation, views: Mapping[int, StateView], seen: Observation
) -> str:
    """`all_gather tp#5 of 4096 bytes`."""
    for progress in views[rank].groups:
        if wait.channel and seen.groups.key(rank, progress.group) == wait.channel.number:
            name = seen.groups.name_of(wait.channel.number)
            size = f" of {progress.bytes} bytes" if progress.bytes else ""
            return f"{op_name(progress.op)} {name}#{progress.entered}{size}"
    return "nothing"


def _ops(
    ranks: Sequence[int], wait: BlockedOperation, views: Mapping[int, StateView], seen: Observation
) -> set[int]:
    return {
        progress.op
        for rank in ranks
        for progress in views[rank].groups
        if wait.channel and seen.groups.key(rank, progress.group) == wait.channel.number
    }


def _waited_for(found: Blame) -> list[Evidence]:
    if not found.dependents:
        return []
    whom = ranks_text(found.ranks)
    verb = "waits" if len(found.dependents) == 1 else "wait"
    nobody = "it waits for nobody" if len(found.ranks) == 1 else "they wait for nobody"
    return [Evidence(f"{ranks_text(found.dependents)} {verb} for {whom}, {nobody}")]


def _stuck_as_well(found: Blame, views: Mapping[int, StateView]) -> list[Evidence]:
    others = [
        rank
        for rank, view in views.items()
        if not communication_frames(view) and rank not in found.ranks
    ]
    if not others:
        return []
    verb = "is" if len(others) == 1 else "are"
    text = f"{ranks_text(others)} {verb} stuck outside communication as well"
    return [Evidence(f"{text}, but nobody waits for {'it' if len(others) == 1 else 'them'}")]


def _witness(found: Blame) -> list[int]:
    """One rank that waits for the culprit: where the job is meant to be."""
    direct = [wait.rank for wait in found.waits if wait.rank not in found.ranks]
    return sorted(direct)[:1] or sorted(found.dependents)[:1]
