"""Phase `launch` of a restart: the launcher that owns an external job restarts it.

It replaces `stop`, `place` and `start` of Paceline's own jobs. The request is committed with the
action, and carried out by the launcher's backend exactly once (docs/adr/0018). The phase ends when
the launcher shows the effect and all ranks of the next generation were found running. If the job
trains again before anything has begun, the request is withdrawn.
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.budget import backs_off
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.incidents import release, resolve
from paceline_server.decide.nodes import is_progressing
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    set_progress,
    update_detail,
)
from paceline_server.decide.restart.control import control_ranks, have_canceled
from paceline_server.decide.restart.place import (
    backoff_text,
    excluded_nodes,
    quarantine_excluded,
)
from paceline_server.decide.restart.start import OBSERVES, fail_start
from paceline_server.decide.types import (
    ActionView,
    JobView,
    LaunchKind,
    LaunchRequest,
    LaunchResult,
)


def request_launch(draft: Draft, action: ActionView, kind: LaunchKind) -> None:
    """Ask the launcher for a restart, or whether one is possible."""
    launch = draft.view.launch
    assert launch is not None, "only a job that a launcher owns has this phase"
    excluded = excluded_nodes(draft, action)
    request = LaunchRequest(
        action_id=action.action_id,
        kind=kind,
        launch=launch,
        exclude=sorted({launch.nodes[agent] for agent in excluded & launch.nodes.keys()}),
        is_training=is_progressing(draft),
        reason=progress_of(action).why,
    )
    draft.request_launch(request)


def enter_launch(draft: Draft, action: ActionView, progress: ActionProgress, detail: str) -> None:
    """Begin the phase; `detail`: a sentence about how the phase before ended."""
    view, launch = draft.view, draft.view.launch
    assert launch is not None, "only a job that a launcher owns has this phase"
    progress = replace(_with_reached(progress, view), known_step=view.checkpoint_step)
    action = replace(action, exclude_nodes=sorted(excluded_nodes(draft, action)))
    quarantine_excluded(draft, action)
    detail = f"{detail} {launch.launcher.capitalize()} restarts job {launch.job}.".strip()
    action = enter_phase(draft, action, progress, "launch", detail)
    advance_launch(draft, action)


def advance_launch(draft: Draft, action: ActionView) -> None:
    """Continue with `observe` once the launcher runs the job again and all ranks were found."""
    progress = progress_of(action)
    reached = _with_reached(progress, draft.view)
    if draft.generation == action.generation and progress != reached:
        # The ranks train on until the launcher ends them.
        progress, action = reached, set_progress(draft, action, reached)
    result = launch_result(draft, action, "restart")
    if can_be_withdrawn(action, result) and _trains_again(draft, action):
        if progress.checkpoint_commands and not progress.cancel_commands:
            # The ranks did not follow the command while they hung, and would now.
            commands = control_ranks(draft, action, "cancel", 0)
            progress = replace(progress, cancel_commands=commands)
            action = set_progress(draft, action, progress)
        elif not progress.cancel_commands or have_canceled(draft, progress):
            _withdraw(draft, action)
            return
    if not progress.is_launch_requested:
        if backs_off(draft.view, draft.policy, draft.now_ns) and not progress.is_request:
            update_detail(draft, action, backoff_text(draft))
            return
        request_launch(draft, action, "restart")
        set_progress(draft, action, replace(progress, is_launch_requested=True))
        return
    if result.state == "over":
        end_as_over(draft, action, result.detail)
    elif result.state == "failed":
        fail_start(draft, action, result.detail)
    elif result.state == "waiting":
        if result.detail:
            update_detail(draft, action, result.detail)
    elif draft.generation > action.generation:
        seconds = draft.policy.start_timeout_seconds
        enter_phase(draft, action, progress, "observe", OBSERVES, seconds=seconds)
    elif progress.deadline_ns == 0:
        seconds = draft.policy.start_timeout_seconds
        deadline_ns = draft.now_ns + int(seconds * NANOSECONDS)
        action = set_progress(draft, action, replace(progress, deadline_ns=deadline_ns))
        update_detail(draft, action, f"{result.detail} Waiting for its ranks.")
    elif draft.now_ns > progress.deadline_ns:
        seconds = draft.policy.start_timeout_seconds
        fail_start(draft, action, f"{result.detail} Not all ranks were found in {seconds:.0f} s.")


def _with_reached(progress: ActionProgress, view: JobView) -> ActionProgress:
    """Return the progress with how far this generation has got."""
    return replace(progress, highest_step=view.current_step, has_saved=view.has_saved)


def can_be_withdrawn(action: ActionView, result: LaunchResult) -> bool:
    """Return whether neither Paceline nor the launcher has begun to end the ranks.

    `result`: of the request for the restart.
    """
    progress = progress_of(action)
    is_saved_on_command = progress.planned and not progress.waits  # the ranks have stopped
    is_pending = result.state == "waiting" and not result.has_begun
    return progress.phase == "launch" and is_pending and not is_saved_on_command


def _trains_again(draft: Draft, action: ActionView) -> bool:
    """Return whether the problem is over without the repair, and a step has finished since."""
    reasons = [one.finding for one in draft.incidents() if one.incident_id == action.incident_id]
    is_over = bool(reasons) and all(finding.cleared for finding in reasons)
    if not is_over or draft.generation != action.generation:
        return False
    last_ns = max((ended_ns for _, ended_ns in draft.view.step_times.values()), default=0)
    return is_progressing(draft) and last_ns > action.created_ns


def _withdraw(draft: Draft, action: ActionView) -> None:
    why = "The job trains again, and its launcher had not begun to restart it."
    draft.withdraw_launch(action.action_id)
    draft.end_action(action, "superseded", error=why, verb="withdrawn")
    draft.change_state("running", why)
    release(draft, action.action_id, why)


def end_as_over(draft: Draft, action: ActionView, why: str) -> None:
    """End the action, and the job if its ranks are gone: the launcher or a person ended it."""
    draft.end_action(action, "superseded", error=why)
    if not is_progressing(draft):
        for incident in draft.incidents():
            resolve(draft, incident, why)
        draft.change_state("stopped", why)


def is_relaunched(draft: Draft) -> bool:
    """Return whether the launcher ends the ranks for a restart; they may end with exit code 0."""
    return any(
        progress_of(action).phase == "launch" and launch_result(draft, action, "restart").has_effect
        for action in draft.actions("running")
    )


def launch_result(draft: Draft, action: ActionView, kind: LaunchKind) -> LaunchResult:
    """Return the newest result of the action's request."""
    return draft.view.launch_results.get((action.action_id, kind), LaunchResult())
