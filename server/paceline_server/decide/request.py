"""A restart that a person requests without a proposal.

The API stores it as an approved action, whatever the policy's mode. `prepare` says in each tick
until it begins what the job can do at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import to_builtins
from msgspec.structs import replace

from paceline_server.decide.checkpoints import expected_checkpoint, resumes
from paceline_server.decide.draft import Draft
from paceline_server.decide.nodes import (
    has_failed,
    is_finishing,
    silent_agents,
    usable_nodes,
)
from paceline_server.decide.placement import place
from paceline_server.decide.progress import ActionProgress, progress_of, restart_reason
from paceline_server.decide.types import ActionView
from paceline_server.decide.wording import join_names, steps_text

LAUNCHER_SECONDS = 300.0  # for the launcher to say whether it can restart the job
_WITHOUT = (
    "it was not stopped. Without a checkpoint first (`--now`), the steps since its newest one are "
    "repeated."
)
_CANNOT_SAVE = (
    "The script cannot save a checkpoint on command, and is not known to save by itself; "
)
_SAVES_TOO_OFTEN = (
    "The script saves a checkpoint {}, so often that a stop could hit a save in progress; "
)
_DOES_NOT_RESUME = (
    "The script does not resume from its checkpoints (policy `resumes`, or its last restart), so "
    "that it would begin again at its first step; it was not stopped. `--now` restarts it all the "
    "same."
)
_MAY_NOT_RESUME = (
    "The script is not known to resume from its checkpoints (policy `resumes`); if it does not, "
    "it begins again at its first step."
)


def requested_restart(
    action_id: str,
    *,
    generation: int,
    created_ns: int,
    by: str,
    comment: str = "",
    exclude: Sequence[str] = (),
    saves: bool = True,
) -> ActionView:
    """Return the action of a request.

    Args:
        generation: the job's current one.
        created_ns: CLOCK_REALTIME of the server.
        by: name of the person.
        exclude: agent ids of the nodes that the next generation must not use.
        saves: whether the job first saves a checkpoint, or is stopped at once.
    """
    comment = " ".join(comment.split()).rstrip(".")
    why = f"requested by {by}: {comment}." if comment else f"requested by {by}."
    progress = ActionProgress(planned=saves, why=why, is_request=True)
    nodes = sorted(set(exclude))
    return ActionView(
        action_id=action_id,
        kind="restart",
        state="approved",
        reason=restart_reason(progress, nodes),
        generation=generation,
        created_ns=created_ns,
        exclude_nodes=nodes,
        parameters=to_builtins(progress),
        decided_by=by,
    )


def prepare(draft: Draft, action: ActionView) -> ActionProgress | str:
    """Return the progress with which a request would begin now, or why it cannot."""
    progress = progress_of(action)
    trains = not has_failed(draft)
    if draft.view.launch is None and (shortage := _shortage(draft, action, trains=trains)):
        return shortage
    if not progress.planned or not trains:
        return replace(progress, planned=False)  # ranks that do not train cannot save
    if is_finishing(draft):
        return "The training is about to end: ranks have finished."
    if draft.view.highest_step is None:
        return f"It has reported no step, so that its ranks cannot be asked to save; {_WITHOUT}"
    if silent := silent_agents(draft):
        names = join_names(silent)
        return f"The agent of {names} is silent, so that its ranks cannot save; {_WITHOUT}"
    if draft.view.can_checkpoint is True:
        return progress
    if expected_checkpoint(draft.view) is None:
        interval = draft.view.experience.checkpoint_interval_steps
        if not interval:
            return _CANNOT_SAVE + _WITHOUT
        often = "after each step" if interval == 1 else f"every {steps_text(interval)}"
        return _SAVES_TOO_OFTEN.format(often) + _WITHOUT
    if resumes(draft.view, draft.policy):
        return replace(progress, waits=True)
    if draft.policy.resumes == "no" or draft.view.experience.resumes is False:
        return _DOES_NOT_RESUME
    return replace(progress, waits=True, remark=_MAY_NOT_RESUME)


def _shortage(draft: Draft, action: ActionView, *, trains: bool) -> str:
    """Return why the ranks have no place; empty if they do. A job that trains is not shrunk."""
    nodes = usable_nodes(draft, set(action.exclude_nodes))
    layout = place(draft.view.spec.topology, nodes, draft.ranks)
    ranks = len(draft.ranks)
    if layout is not None and (layout.topology.world_size >= ranks or not trains):
        return ""
    without = f" without {join_names(action.exclude_nodes)}" if action.exclude_nodes else ""
    slots = sum(node.slots for node in nodes)
    return (
        f"The usable nodes{without} have {slots} slots for its {ranks} ranks; it was not stopped."
    )
