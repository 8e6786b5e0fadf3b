"""Ending a job: the `stop` action, requested by a person, or because Paceline gives up."""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import resolve, resolve_information
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    update_detail,
)
from paceline_server.decide.stopping import (
    agents_of_generation,
    repeat_stop,
    request_stop,
    unconfirmed,
)
from paceline_server.decide.types import ActionView, JobState
from paceline_server.decide.wording import join_names

# lets the ranks of a job that a person stops end cleanly; a repair does not wait
USER_GRACE_SECONDS = 2.0
TRIES = 3


def begin_stop(draft: Draft, ends_as: JobState, reason: str, incident_id: str | None) -> ActionView:
    """Begin to end the job, as "stopped" (by a person) or "failed" (by the policy)."""
    for action in draft.actions("proposed", "approved", "running"):
        draft.end_action(action, "superseded", error=f"The job is being ended: {reason}")
    action = draft.put_action(
        ActionView(
            action_id=draft.new_id("act"),
            kind="stop",
            state="running",
            reason=reason,
            generation=draft.generation,
            created_ns=draft.now_ns,
            incident_id=incident_id,
        )
    )
    draft.audit("policy", "stops the job", action.action_id, reason)
    # Quarantined nodes may hold ranks whose end was never confirmed: stop those, too.
    quarantined = {node.agent_id for node in draft.view.nodes if node.quarantined}
    agents = agents_of_generation(draft) | quarantined if draft.generation else set[str]()
    grace_seconds = USER_GRACE_SECONDS if ends_as == "stopped" else 0.0
    commands = request_stop(draft, action, agents, grace_seconds=grace_seconds)
    return enter_phase(
        draft,
        action,
        ActionProgress(ends_as=ends_as, stop_commands=commands),
        "stop",
        f"Stopping the ranks on {join_names(agents)}." if agents else "No ranks to stop.",
        seconds=draft.policy.stop_timeout_seconds + grace_seconds,
    )


def advance_stop(draft: Draft, action: ActionView) -> None:
    """End the job once every node has confirmed, or has not after three requests."""
    progress = progress_of(action)
    waiting = unconfirmed(draft, progress.stop_commands)
    ends_as: JobState = progress.ends_as or "stopped"
    if not waiting:
        draft.end_action(action, "done", verb="finished")
        _end(draft, ends_as, action.reason)
    elif draft.now_ns > progress.deadline_ns and progress.tries >= TRIES:
        error = (
            f"{join_names(waiting)} did not confirm that the ranks are dead: "
            "check these nodes for remaining processes."
        )
        draft.end_action(action, "failed", error=error)
        _end(draft, ends_as, f"{action.reason} {error}")
    elif draft.now_ns > progress.deadline_ns:
        action = repeat_stop(draft, action, waiting)
        update_detail(draft, action, f"Asked {join_names(waiting)} again to stop its ranks.")


def _end(draft: Draft, ends_as: JobState, why: str) -> None:
    """Set the final state. A failed job keeps the incidents that explain why it failed."""
    resolve_information(draft)
    for incident in draft.incidents():
        if ends_as == "stopped":
            resolve(draft, incident, "The job was stopped.")
        elif incident.state == "mitigating":
            draft.put_incident(replace(incident, state="open"))
    draft.change_state(ends_as, why)
