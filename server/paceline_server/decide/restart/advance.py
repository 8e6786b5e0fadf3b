"""Begin a restart or a start, and advance it from phase to phase.

    checkpoint -> stop -> place -> start -> observe -> done
        |-> cancel -> (called off)
    wait -> stop -> ...
    stop, place, start of a job that a launcher owns -> launch

A planned restart begins with a checkpoint that all ranks write at one agreed step. If that fails
while the job makes progress, the restart is called off and proposed to a person: training is never
stopped without a checkpoint unless a person approved it. If the ranks no longer make progress, they
are stopped without one. For a script that saves, but not on command, it begins with the `wait` for
its own next checkpoint, during which nothing changes. The first start of a job begins at
`start`. A phase ends only by the agents' results or by its deadline. Every action is committed
before its commands are sent.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import mitigate
from paceline_server.decide.nodes import is_progressing
from paceline_server.decide.placement import RankLayout
from paceline_server.decide.progress import ActionProgress, PhaseName, progress_of
from paceline_server.decide.restart.checkpoint import (
    advance_cancel,
    advance_checkpoint,
    enter_checkpoint,
)
from paceline_server.decide.restart.launch import advance_launch
from paceline_server.decide.restart.place import advance_place
from paceline_server.decide.restart.start import (
    advance_observe,
    advance_start,
    start_generation,
)
from paceline_server.decide.restart.stop import advance_stop_phase, enter_stop
from paceline_server.decide.restart.wait import advance_wait, enter_wait
from paceline_server.decide.types import ActionView
from paceline_server.decide.wording import join_names


def begin_restart(draft: Draft, action: ActionView) -> None:
    """Run a proposed or approved restart."""
    progress = progress_of(action)
    planned = progress.planned and is_progressing(draft)
    progress = replace(progress, planned=planned, highest_step=draft.view.current_step)
    action = draft.put_action(replace(action, state="running"))
    if planned and progress.waits:
        enter_wait(draft, action, progress)
        return
    draft.change_state("recovering", action.reason)
    for incident in draft.incidents():
        if incident.finding.severity != "info":
            mitigate(draft, incident.incident_id, action.action_id)
    if planned:
        enter_checkpoint(draft, action, progress)
    else:
        stops = "Stopping all ranks." if draft.view.launch is None else ""
        enter_stop(draft, action, progress, stops)


def begin_start(draft: Draft, layout: RankLayout) -> None:
    """Start the first generation of a pending job."""
    nodes = join_names({rank.agent_id for rank in layout.ranks})
    topology = layout.topology
    reason = f"Start {draft.view.spec.name} at {topology.text()} on {nodes}."
    action = draft.put_action(
        ActionView(
            action_id=draft.new_id("act"),
            kind="start",
            state="running",
            reason=reason,
            generation=draft.generation,
            created_ns=draft.now_ns,
        )
    )
    draft.change_state("starting", reason)
    start_generation(draft, action, ActionProgress(), layout)


def advance_restart(draft: Draft, action: ActionView) -> None:
    """Advance the action with the results that arrived since the last tick."""
    phase = progress_of(action).phase
    grown, has_started = draft.generation - action.generation, phase in ("start", "observe")
    # A launcher numbers generations itself, and the next one may be found before or after it shows
    # its effect.
    is_launch = phase == "launch" or (has_started and draft.view.launch is not None)
    if grown < has_started if is_launch else grown != has_started:
        draft.end_action(action, "superseded", error="The job is at another generation already.")
        return
    _PHASES[phase or "stop"](draft, action)


_PHASES: dict[PhaseName, Callable[[Draft, ActionView], None]] = {
    "checkpoint": advance_checkpoint,
    "cancel": advance_cancel,
    "wait": advance_wait,
    "stop": advance_stop_phase,
    "place": advance_place,
    "launch": advance_launch,
    "start": advance_start,
    "observe": advance_observe,
}
