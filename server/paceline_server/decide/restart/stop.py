"""Phase `stop` of a restart: every rank of the old generation is confirmed dead."""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.budget import fruitless_restarts
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.nodes import quarantine, usable_nodes
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    set_progress,
    update_detail,
)
from paceline_server.decide.restart.launch import enter_launch
from paceline_server.decide.restart.place import add_lost_nodes, enter_place
from paceline_server.decide.stopping import (
    agents_of_generation,
    repeat_stop,
    request_stop,
    unconfirmed,
)
from paceline_server.decide.types import ActionView
from paceline_server.decide.wording import join_names
from paceline_server.detect.causes.catalog import cannot_resume
from paceline_server.detect.kinds import FAILURE

_TRIES = 2
_SPARE_SECONDS = 2.0  # for spare nodes, which usually have nothing to stop


def enter_stop(draft: Draft, action: ActionView, progress: ActionProgress, detail: str) -> None:
    if draft.view.launch is not None:
        enter_launch(draft, action, progress, detail)
        return
    # A spare node that was silent when an earlier generation ended may still run ranks of it.
    spare = {node.agent_id for node in usable_nodes(draft, set())}
    agents = agents_of_generation(draft) | spare
    commands = request_stop(draft, action, agents, renew=_may_renew(draft, action, progress))
    progress = replace(progress, stop_commands=commands, tries=1)
    seconds = draft.policy.stop_timeout_seconds
    enter_phase(draft, action, progress, "stop", detail, seconds=seconds)


def _may_renew(draft: Draft, action: ActionView, progress: ActionProgress) -> bool:
    """Return whether ranks may stay in their processes for the next generation (ADR 19).

    Only after the loss of a rank or node, or to move ranks from the node at fault: another fault
    may be in the processes. And only if the last restart made progress, so that two in a row are
    never of this kind.
    """
    if progress.avoid or progress.roll_back_onset is not None or action.incident_id is None:
        return False
    finding = draft.incident(action.incident_id).finding
    if progress.planned:
        leaves_fault = finding.node is not None and finding.node in action.exclude_nodes
    else:
        leaves_fault = finding.kind == FAILURE.name or cannot_resume(finding.cause)
    return leaves_fault and fruitless_restarts(draft.view, draft.policy) == 0


def advance_stop_phase(draft: Draft, action: ActionView) -> None:
    """Continue with `place` once the old ranks are dead.

    Nodes that never confirm are quarantined.
    """
    progress = add_lost_nodes(draft, action, progress_of(action))
    if progress != progress_of(action):
        action = set_progress(draft, action, progress)
    unsure = unconfirmed(draft, progress.stop_commands)
    waiting = unsure & agents_of_generation(draft)
    if not waiting:
        if not unsure or draft.now_ns - progress.since_ns > _SPARE_SECONDS * NANOSECONDS:
            enter_place(draft, action, progress, "All ranks of the old generation are dead.")
    elif draft.now_ns > progress.deadline_ns and progress.tries < _TRIES:
        action = repeat_stop(draft, action, waiting)
        update_detail(draft, action, f"Asked {join_names(waiting)} again to stop its ranks.")
    elif draft.now_ns > progress.deadline_ns:
        for agent in waiting:
            quarantine(draft, agent, "It did not confirm that its ranks are dead.")
        detail = f"Continuing without {join_names(waiting)}: no response."
        enter_place(draft, action, progress, detail)
