"""A restart that a person requests without a proposal.

The API stores it as an approved action, whatever the policy's mode. `prepare` completes it with
what the job can do at this moment, before it begins like any other approved restart.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import to_builtins
from msgspec.structs import replace

from paceline_server.decide.checkpoints import expected_checkpoint, resumes
from paceline_server.decide.draft import Draft
from paceline_server.decide.nodes import has_stopped, usable_nodes
from paceline_server.decide.placement import place
from paceline_server.decide.progress import ActionProgress, progress_of, restart_reason
from paceline_server.decide.types import ActionView
from paceline_server.decide.wording import join_names

_CANNOT_SAVE = (
    "The script cannot save a checkpoint on command, and is not known to save by itself; it was "
    "not stopped. Without a checkpoint first (`--now`), the steps since its newest one are repeated."
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
    why = f"requested by {by}" + (f": {comment.strip().rstrip('.')}." if comment.strip() else ".")
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
    """Return the progress with which a request begins, or why it cannot be carried out."""
    progress = replace(progress_of(action), is_request=False)
    if draft.view.launch is None and action.exclude_nodes:
        nodes = usable_nodes(draft, set(action.exclude_nodes))
        if place(draft.view.spec.topology, nodes, draft.ranks) is None:
            without = join_names(action.exclude_nodes)
            return f"The job does not fit on the nodes without {without}; it was not stopped."
    if not progress.planned or has_stopped(draft):
        return replace(progress, planned=False)  # a job that does not train cannot save
    if draft.view.can_checkpoint is True:
        return progress
    if expected_checkpoint(draft.view) is None:
        return _CANNOT_SAVE
    remark = "" if resumes(draft.view, draft.policy) else _MAY_NOT_RESUME
    return replace(progress, waits=True, remark=remark)
