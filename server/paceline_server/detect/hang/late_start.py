"""A job that does not start, because a rank has not called `init_process_group`.

Such a rank is loading: it imports, downloads or waits for a lock. The others wait for it in the
call, or in their first communication if the backend connects later (NCCL).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline_server.detect.finding import Evidence
from paceline_server.detect.hang.rank_cause import cpu_evidence, process_cause
from paceline_server.detect.hang.verdict import HangVerdict
from paceline_server.detect.hang.wait_for_graph import communication_frames
from paceline_server.detect.observation import Generation, LiveRank
from paceline_server.detect.rank_list import ranks_text
from paceline_server.steps.groups import Groups
from paceline_wire.stacks import StackFrame

CALL = "init_process_group"
NOT_CALLED = f"stuck before {CALL}"
NOT_RETURNED = f"stuck in {CALL}"
_MAX_CULPRIT_STACKS = 3


@dataclass(frozen=True, slots=True)
class LateStart:
    """The ranks that have not called `init_process_group`, and those that wait for them."""

    late: tuple[int, ...]  # empty: all are in the call
    waiting: tuple[int, ...]
    seconds: float  # since a rank made progress, as the agents have observed

    @property
    def cause(self) -> str:
        return NOT_CALLED if self.late else NOT_RETURNED


def late_start(
    live: Sequence[LiveRank], unseen: Collection[int], groups: Groups
) -> LateStart | None:
    """Return who waits for whom; None if no rank does.

    Args:
        live: ranks with a recent state page.
        unseen: ranks that run and have never had a state page.
        groups: process groups of the job.
    """
    joining = [each for each in live if each.status == "joining"]
    late = frozenset(each.rank for each in live if each.status == "loading") | {*unseen}
    if not late and len(joining) < max(2, len(live)):
        return None
    others = [each for each in live if _communicates_with(each, late, groups)] if late else []
    waiting = [*joining, *others]
    if not waiting:
        return None
    return LateStart(
        late=tuple(sorted(late)),
        waiting=tuple(sorted(each.rank for each in waiting)),
        seconds=min(each.surely_frozen_seconds for each in live if each.rank not in late),
    )


def late_verdict(found: LateStart, live: Sequence[LiveRank]) -> HangVerdict:
    """Return the verdict on the ranks that the others wait for."""
    if not found.late:
        return HangVerdict(
            found.waiting,
            found.cause,
            "host",
            [Evidence(f"all {len(found.waiting)} ranks have called it, and it returns on none")],
            is_single=False,
            stacks_wanted=found.waiting[:2],
        )
    evidence = [Evidence(f"{ranks_text(found.waiting)} {_waits(found)}")]
    first = next((each for each in live if each.rank == found.late[0]), None)
    if first is not None:
        process = process_cause(first)
        evidence += cpu_evidence(first) if process is None else process[1]
    return HangVerdict(
        found.late,
        found.cause,
        "host",
        evidence,
        is_single=len(found.late) == 1,
        stacks_wanted=[*found.late[:_MAX_CULPRIT_STACKS], found.waiting[0]],
    )


def late_summary(found: LateStart, generation: Generation, frame: StackFrame | None) -> str:
    """Return `Rank 2 (node-0) is stuck before init_process_group (train.py:17 load): ...`."""
    place = "" if frame is None else f" ({frame})"
    if not found.late:
        count = len(found.waiting)
        return (
            f"The job is {found.cause}{place}: all {count} ranks have called it, and it has not "
            f"returned for {found.seconds:.0f} s."
        )
    subject, verb = generation.subject(found.late[0]), "is"
    if len(found.late) > 1:
        subject, verb = f"R{ranks_text(found.late)[1:]}", "are"
    count = len(found.waiting)
    waiting = "1 rank" if count == 1 else f"{count} ranks"
    return f"{subject} {verb} {found.cause}{place}: {waiting} {_waits(found)}."


def _waits(found: LateStart) -> str:
    verb = "has" if len(found.waiting) == 1 else "have"
    them = "it" if len(found.late) == 1 else "them"
    return f"{verb} waited for {them} for {found.seconds:.0f} s"


def _communicates_with(live: LiveRank, late: frozenset[int], groups: Groups) -> bool:
    """Return whether the rank is in a communication in which a late rank has to take part."""
    for frame in [] if live.state is None else communication_frames(live.state.view):
        key = groups.key(live.rank, frame.group)
        if frame.peer in late or (key is not None and late & {*groups.members(key)}):
            return True
    return False
