"""Progress of a running action: what `decide` stores in the action's `parameters`."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.types import ActionView, JobState, Phase
from paceline_server.decide.wording import join_names

PhaseName = Literal["checkpoint", "cancel", "wait", "stop", "place", "launch", "start", "observe"]


class ActionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """State of one action between two ticks.

    Commands are {agent_id: command_id}; a repeated command replaces the id.
    """

    phase: PhaseName | None = None  # None: not begun
    since_ns: int = 0
    planned: bool = False  # whether to save a checkpoint before the ranks are stopped
    waits: bool = False  # planned: for the script's own next checkpoint, not one on command
    why: str = ""  # what is wrong, one sentence
    kept_ratio: float = 1.0  # planned: ranks of the next generation over those of this one
    held: bool = False  # proposed only because its gain is smaller than its cost: begun later
    after_window: bool = False  # proposed only because of a maintenance window: begun after it
    is_request: bool = False  # requested by a person: see `request.py`
    remark: str = ""  # sentences that follow the price in the reason of a proposal
    launch_remark: str = ""  # external job: why its launcher cannot restart it now
    node: str | None = None  # the node to blame
    ends_as: JobState | None = None  # final job state of a `stop` action
    target_step: int | None = None
    highest_step: int | None = None  # finished by the generation that ends
    has_saved: bool = False  # the same for `JobView.has_saved`
    saved_step: int | None = None  # steps completed in the checkpoint that it stops after
    # the newest checkpoint when the wait began, or when a stop without one was proposed
    saved_before: int | None = None
    last_step: int = 0  # after which the wait is given up
    known_step: int | None = None  # newest known checkpoint when the new generation started
    first_step: int | None = None  # first step that the new generation finished
    deadline_ns: int = 0
    exits_seen_ns: int = 0  # when the new generation was first seen to have lost a rank
    tries: int = 1  # number of times that the stop command was sent
    roll_back_onset: int | None = None  # go back to before this step
    lost: list[str] = []  # excluded; used again if no other node is left: silent, or released since
    avoid: list[str] = []  # used only if the job does not fit on the others, the last one first
    checkpoint_commands: dict[str, int] = {}
    cancel_commands: dict[str, int] = {}
    trouble: str = ""  # why the checkpoint was called off
    is_launch_requested: bool = False  # external job: its launcher was asked for the restart
    stop_commands: dict[str, int] = {}
    start_commands: dict[str, int] = {}


def progress_of(action: ActionView) -> ActionProgress:
    return msgspec.convert(action.parameters, ActionProgress)


def set_progress(draft: Draft, action: ActionView, progress: ActionProgress) -> ActionView:
    parameters = msgspec.to_builtins(progress)
    return draft.put_action(msgspec.structs.replace(action, parameters=parameters))


def follow_clock(draft: Draft, action: ActionView) -> ActionView:
    """If the clock was set back, let the phase begin now: its deadline would be as far away."""
    progress = progress_of(action)
    ahead_ns = progress.since_ns - draft.now_ns
    if ahead_ns <= 0:
        return action
    progress = msgspec.structs.replace(
        progress,
        since_ns=draft.now_ns,
        deadline_ns=max(0, progress.deadline_ns - ahead_ns),
        exits_seen_ns=min(progress.exits_seen_ns, draft.now_ns),
    )
    return set_progress(draft, action, progress)


def enter_phase(
    draft: Draft,
    action: ActionView,
    progress: ActionProgress,
    phase: PhaseName,
    detail: str,
    *,
    seconds: float | None = None,
) -> ActionView:
    """Move the action to `phase`.

    Args:
        detail: one sentence about the phase, shown to people.
        seconds: time until the phase's deadline; None: it has no deadline.
    """
    progress = msgspec.structs.replace(
        progress,
        phase=phase,
        since_ns=draft.now_ns,
        deadline_ns=draft.now_ns + int(seconds * NANOSECONDS) if seconds is not None else 0,
    )
    draft.audit("policy", f"entered phase {phase}", action.action_id, detail)
    return draft.put_action(
        msgspec.structs.replace(
            action,
            phases=[*action.phases, Phase(phase, draft.now_ns, detail)],
            parameters=msgspec.to_builtins(progress),
        )
    )


def update_detail(draft: Draft, action: ActionView, detail: str) -> ActionView:
    """Replace the text of the current phase with what it waits for now."""
    if not action.phases or action.phases[-1].detail == detail:
        return action
    last = msgspec.structs.replace(action.phases[-1], detail=detail)
    draft.audit("policy", "waits", action.action_id, detail)
    return draft.put_action(msgspec.structs.replace(action, phases=[*action.phases[:-1], last]))


def restart_reason(progress: ActionProgress, exclude: list[str]) -> str:
    """Return the reason of a restart for people to read."""
    parts = [f"without {join_names(exclude)}"] if exclude else []
    if progress.node in progress.avoid and progress.node not in exclude:
        parts.append(f"if possible not on {progress.node}")
    if progress.roll_back_onset is not None:
        parts.append(f"from a checkpoint before step {progress.roll_back_onset}")
    where = ", ".join(parts) or "in place"
    if progress.waits:
        return f"Restart {where} after the script's own next checkpoint: {progress.why}"
    if progress.planned:
        at = ""
        if progress.saved_step is not None:
            at = f" at step {progress.saved_step}"
        elif progress.target_step is not None:
            at = f" at step {progress.target_step} or later"
        return f"Checkpoint{at} and restart {where}: {progress.why}"
    return f"Restart {where}: {progress.why}"
