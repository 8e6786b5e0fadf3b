"""Phase `checkpoint` of a planned restart: all ranks save one agreed step, then stop.

Phase `cancel` follows if they do not: the command is withdrawn, and training continues.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from paceline_server.decide.draft import Draft
from paceline_server.decide.nodes import fatal_findings, has_failed, silent_agents
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    restart_reason,
)
from paceline_server.decide.restart.control import control_ranks, have_canceled
from paceline_server.decide.restart.place import excluded_nodes
from paceline_server.decide.restart.stop import enter_stop
from paceline_server.decide.restart.warm_spare import preload_without
from paceline_server.decide.types import ActionView
from paceline_server.decide.wording import exit_text, join_names, join_numbers

_CANCEL_SECONDS = 15.0  # for the ranks to confirm that they no longer follow the command


def enter_checkpoint(draft: Draft, action: ActionView, progress: ActionProgress) -> None:
    newest = draft.view.current_step
    assert newest is not None, "a planned restart needs steps"
    step_seconds = draft.view.step_seconds or 1.0
    # One second for the command to reach every rank, but at least two steps: one rank receives it
    # at a step boundary, the others at the next reduction.
    ahead = max(2, math.ceil(1.0 / max(step_seconds, 1e-3)) + 1)
    target = newest + ahead
    commands = control_ranks(draft, action, "checkpoint_and_stop", target)
    progress = replace(progress, target_step=target, checkpoint_commands=commands)
    action = replace(action, reason=restart_reason(progress, action.exclude_nodes))
    enter_phase(
        draft,
        action,
        progress,
        "checkpoint",
        f"All ranks save the same step, {target} or later, and stop.",
        seconds=draft.policy.checkpoint_timeout_seconds + ahead * step_seconds,
    )
    # while the others still save
    preload_without(draft, action.action_id, excluded_nodes(draft, action))


def advance_checkpoint(draft: Draft, action: ActionView) -> None:
    """Continue with `stop` once all ranks have saved the same step; cancel if they cannot."""
    progress = progress_of(action)
    saved = _saved(draft, progress)
    if _stop_if_saved(draft, action, progress, saved):
        return
    trouble = _checkpoint_trouble(draft, progress, saved)
    if trouble is None:
        return
    if has_failed(draft):
        _stop_without_checkpoint(draft, action, progress, f"No checkpoint: {trouble}")
        return
    progress = replace(
        progress,
        trouble=f"no checkpoint could be saved: {trouble}",
        cancel_commands=control_ranks(draft, action, "cancel", 0),
    )
    detail = f"No checkpoint: {trouble} The command is withdrawn."
    enter_phase(draft, action, progress, "cancel", detail, seconds=_CANCEL_SECONDS)


def advance_cancel(draft: Draft, action: ActionView) -> None:
    """Call the restart off once the ranks no longer follow the command, or do not respond."""
    progress = progress_of(action)
    if _stop_if_saved(draft, action, progress, _saved(draft, progress)):
        return
    if has_failed(draft):
        trouble = progress.trouble[:1].upper() + progress.trouble[1:]
        _stop_without_checkpoint(draft, action, progress, trouble)
        return
    if not have_canceled(draft, progress) and draft.now_ns <= progress.deadline_ns:
        return
    draft.end_action(action, "failed", error=f"Called off: {progress.trouble} Training continues.")
    draft.change_state("running", "The restart was called off.")
    for incident in draft.incidents():
        if incident.state == "mitigating" and action.action_id in incident.action_ids:
            draft.put_incident(replace(incident, state="open"))


def _saved(draft: Draft, progress: ActionProgress) -> dict[int, int]:
    """Return {rank: step} of the ranks that saved on command."""
    ids = set(progress.checkpoint_commands.values())
    return {
        result.rank: result.step
        for result in draft.view.acknowledged
        if result.command_id in ids and result.status == "done"
    }


def _stop_if_saved(
    draft: Draft, action: ActionView, progress: ActionProgress, saved: dict[int, int]
) -> bool:
    """Continue with `stop` if all ranks have saved the same step. Return whether they have."""
    if len(saved) < len(draft.ranks) or len(set(saved.values())) != 1:
        return False
    step = next(iter(saved.values()))
    progress = replace(progress, saved_step=step)
    action = replace(action, reason=restart_reason(progress, action.exclude_nodes))
    enter_stop(draft, action, progress, f"All {len(saved)} ranks saved step {step}.")
    return True


def _stop_without_checkpoint(
    draft: Draft, action: ActionView, progress: ActionProgress, trouble: str
) -> None:
    progress = replace(progress, planned=False)
    action = replace(action, reason=restart_reason(progress, action.exclude_nodes))
    detail = f"{trouble} The ranks no longer make progress. Stopping all ranks."
    enter_stop(draft, action, progress, detail)


def _checkpoint_trouble(
    draft: Draft, progress: ActionProgress, saved: dict[int, int]
) -> str | None:
    """Return why the checkpoint will not be complete; None: it still may be."""
    ids = set(progress.checkpoint_commands.values())
    missing = [rank for rank in draft.ranks if rank.rank not in saved]
    silent = silent_agents(draft) & {rank.agent_id for rank in missing}
    dead = [rank for rank in missing if rank.state == "exited" and not rank.commanded]
    has_failed = any(
        result.command_id in ids and result.status == "failed" for result in draft.view.acknowledged
    )
    refused = {
        agent
        for agent, command_id in progress.checkpoint_commands.items()
        if draft.view.command_results.get(command_id) is False
    }
    if not missing:
        return f"the ranks saved different steps ({join_numbers(set(saved.values()))})."
    if dead:
        return f"rank {dead[0].rank} {exit_text(dead[0])}."
    if has_failed:  # on which rank is not known: they agree, so each of them answers so
        return "not all ranks could save."
    if silent:
        return f"{join_names(silent)} stopped responding."
    if refused:
        return f"{join_names(refused)} could not pass the command on."
    if fatal_findings(draft):
        return "the ranks no longer make progress."
    if draft.now_ns > progress.deadline_ns:
        return f"ranks {join_numbers({rank.rank for rank in missing})} did not finish in time."
    return None
