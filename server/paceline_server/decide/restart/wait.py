"""Phase `wait` of a planned restart: the script's own next checkpoint, then the stop.

For a script that saves checkpoints, but not on command. Until the stop nothing changes: training
continues, incidents stay open, a person may reject the restart, and a more urgent one supersedes
it.

A checkpoint is used only once every rank has finished one more step: by then the script has done
all that belongs to it (further files, renaming, a pointer to the newest). If the next one is about
to begin, the restart waits for that, because a stop in the middle of a save may destroy the file
that is being replaced.
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.checkpoints import STOP_SECONDS, expected_checkpoint
from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import is_fatal, mitigate
from paceline_server.decide.nodes import is_progressing
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    set_progress,
    update_detail,
)
from paceline_server.decide.remedies import remedy_for
from paceline_server.decide.restart.stop import enter_stop
from paceline_server.decide.types import ActionView

INTERVALS = 3  # without a checkpoint, after which the restart is proposed to a person


def enter_wait(draft: Draft, action: ActionView, progress: ActionProgress) -> None:
    view, expected = draft.view, expected_checkpoint(draft.view)
    if expected is None or view.current_step is None:
        _call_off(draft, action, progress, "the script's checkpoints are no longer regular.")
        return
    progress = replace(
        progress,
        saved_before=view.checkpoint_step,
        last_step=view.current_step + INTERVALS * expected.interval_steps,
    )
    detail = f"Waiting for the script's own next checkpoint, {expected.text()}."
    enter_phase(draft, action, progress, "wait", detail)


def advance_wait(draft: Draft, action: ActionView) -> None:
    """Continue with `stop` after the next checkpoint; give up after three intervals."""
    if not is_progressing(draft):
        if all(rank.state == "exited" for rank in draft.ranks):
            draft.end_action(action, "superseded", error="All ranks have exited.")
        return  # the incident that stopped them is treated on its own
    progress = progress_of(action)
    newest = draft.view.checkpoint_step
    if newest and newest not in (progress.saved_before, progress.saved_step):
        progress = replace(progress, saved_step=newest)
        action = set_progress(draft, action, progress)
        detail = f"The script saved step {newest}. Stopping after one more step of all ranks."
        action = update_detail(draft, action, detail)
    if progress.saved_step is not None and _may_stop(draft, progress.saved_step):
        _stop(draft, action, progress)
    elif (draft.view.current_step or 0) > progress.last_step:
        trouble = f"the script saved no checkpoint within {INTERVALS} of its usual intervals."
        _call_off(draft, action, progress, trouble)


def _call_off(draft: Draft, action: ActionView, progress: ActionProgress, trouble: str) -> None:
    """End the action; `propose` then proposes the restart to a person."""
    action = set_progress(draft, action, replace(progress, trouble=trouble))
    draft.end_action(action, "failed", error=f"Called off: {trouble} Training continues.")


def _may_stop(draft: Draft, saved_step: int) -> bool:
    """Return whether the checkpoint is behind all ranks, and the next one is not about to begin."""
    # Ranks of a running job that have finished no step have none, as a generator.
    if min(draft.newest_steps, default=-1) < saved_step:
        return False
    expected = expected_checkpoint(draft.view)
    return expected is None or expected.seconds > STOP_SECONDS


def _stop(draft: Draft, action: ActionView, progress: ActionProgress) -> None:
    """Stop the ranks, if a restart is still the remedy: much may have changed during the wait."""
    if action.incident_id is not None:
        remedy = remedy_for(draft, draft.incident(action.incident_id))
        if remedy is None or not remedy.planned:
            why = "It no longer needs a restart." if remedy is None else remedy.why
            draft.end_action(action, "superseded", error=why)
            return
    progress = replace(progress, highest_step=draft.view.current_step)
    draft.change_state("recovering", action.reason)
    for incident in draft.incidents():
        if incident.finding.severity != "info" and not is_fatal(incident.finding):
            mitigate(draft, incident.incident_id, action.action_id)
    detail = f"The script saved step {progress.saved_step} by itself. Stopping all ranks."
    enter_stop(draft, action, progress, detail)
