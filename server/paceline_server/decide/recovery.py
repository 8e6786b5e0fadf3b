"""How long the parts of a repair took, from the onset of the problem to a step of all ranks. Pure.

    onset -detect-> detection -decide-> proposal -approve-> begin
        -save-> -stop-> -place-> -launch-> -start-> -resume-> first step of all ranks

All times are of the server's CLOCK_REALTIME.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline_server.decide.draft import NANOSECONDS
from paceline_server.decide.types import ActionView, IncidentView

# In the order in which they happen. `RecoveryTimes` has their definitions.
PARTS = ("detect", "decide", "approve", "save", "stop", "place", "launch", "start", "resume")
_PART_OF_PHASE = {
    "checkpoint": "save",
    "cancel": "save",
    "wait": "save",
    "stop": "stop",
    "place": "place",
    "launch": "launch",
    "start": "start",
    "observe": "resume",
}


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one repair in seconds. None: not part of it, or not known."""

    # from the end of the last step, or the start of the first slow one, to the detection
    detect_seconds: float | None = None
    # to the proposal or, without a person, to its begin; also between a failed action and the next
    decide_seconds: float | None = None
    approve_seconds: float | None = None  # to the approval by a person
    save_seconds: float | None = None  # until a checkpoint is saved, on command or by the script
    stop_seconds: float | None = None  # until all ranks are confirmed dead
    place_seconds: float | None = None  # wait for nodes or the backoff
    launch_seconds: float | None = None  # external job: until its launcher runs new ranks
    start_seconds: float | None = None  # until all agents have started their ranks
    resume_seconds: float | None = None  # until all ranks have finished a step
    # From the onset, else the detection, to the first step of all ranks. None: not recovered.
    total_seconds: float | None = None


def recovery_of(incident: IncidentView, actions: Iterable[ActionView]) -> RecoveryTimes | None:
    """Return the recovery from the incident by its restarts; None if none was begun.

    `actions`: of the incident, also those that failed or were rejected.
    """
    begun = [one for one in actions if one.kind == "restart" and one.phases]
    if not begun:
        return None
    spent = dict[str, int]()
    detected_ns, onset_ns = incident.detection_ns, incident.onset_ns
    if onset_ns is not None:
        _spend(spent, "detect", onset_ns, detected_ns)
    until_ns = detected_ns
    for action in sorted(begun, key=lambda one: one.phases[0].started_ns):
        begun_ns = action.phases[0].started_ns
        if action.decided_by is None:
            _spend(spent, "decide", until_ns, begun_ns)
        else:
            _spend(spent, "decide", until_ns, action.created_ns)
            _spend(spent, "approve", max(until_ns, action.created_ns), begun_ns)
        _spend_phases(spent, action)
        until_ns = max(until_ns, action.finished_ns or begun_ns)
    is_done = action.state == "done"
    began_ns = detected_ns if onset_ns is None else onset_ns
    return RecoveryTimes(
        **{f"{part}_seconds": value / NANOSECONDS for part, value in spent.items()},
        total_seconds=max(0, until_ns - began_ns) / NANOSECONDS if is_done else None,
    )


def _spend_phases(spent: dict[str, int], action: ActionView) -> None:
    ends = [*(phase.started_ns for phase in action.phases[1:]), action.finished_ns]
    for phase, end_ns in zip(action.phases, ends, strict=True):
        part = _PART_OF_PHASE.get(phase.name)
        if part is not None and end_ns is not None:
            _spend(spent, part, phase.started_ns, end_ns)


def _spend(spent: dict[str, int], part: str, since_ns: int, until_ns: int) -> None:
    spent[part] = spent.get(part, 0) + max(0, until_ns - since_ns)
