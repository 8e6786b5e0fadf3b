"""How far a running action has come: what `decide` keeps for itself in its `parameters`."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.types import ActionView, JobState, Phase

PhaseName = Literal["checkpoint", "stop", "place", "start", "observe"]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The commands are {agent_id: command_id}; a repeated one replaces the id."""

    phase: PhaseName | None = None  # None: not begun
    since_ns: int = 0
    planned: bool = False
    why: str = ""  # what is wrong, one sentence
    node: str | None = None  # held responsible
    ends_as: JobState | None = None  # of an action `stop`
    target_step: int | None = None
    highest_step: int | None = None  # finished by the generation that ends
    saved_step: int | None = None  # steps completed in the checkpoint all ranks agreed on
    first_step: int | None = None  # the first seen finished by the new generation
    deadline_ns: int = 0
    tries: int = 1  # of the stop
    lost: list[str] = []  # left out because they were silent: welcome again if nothing else is
    checkpoint_commands: dict[str, int] = {}
    stop_commands: dict[str, int] = {}
    start_commands: dict[str, int] = {}


def course_of(action: ActionView) -> Course:
    return msgspec.convert(action.parameters, Course)


def enter(
    draft: Draft,
    action: ActionView,
    course: Course,
    phase: PhaseName,
    detail: str,
    *,
    seconds: float | None = None,
) -> ActionView:
    """Move to `phase`, to be left within `seconds`; `detail` is shown to people."""
    course = msgspec.structs.replace(
        course,
        phase=phase,
        since_ns=draft.now_ns,
        deadline_ns=draft.now_ns + int(seconds * NANOSECONDS) if seconds is not None else 0,
    )
    draft.audit("policy", f"entered phase {phase}", action.action_id, detail)
    return draft.put_action(
        msgspec.structs.replace(
            action,
            phases=[*action.phases, Phase(phase, draft.now_ns, detail)],
            parameters=msgspec.to_builtins(course),
        )
    )


def explain(draft: Draft, action: ActionView, detail: str) -> ActionView:
    """Say anew what the current phase waits for; nothing happens if it is the same."""
    if not action.phases or action.phases[-1].detail == detail:
        return action
    last = msgspec.structs.replace(action.phases[-1], detail=detail)
    draft.audit("policy", "waits", action.action_id, detail)
    return draft.put_action(msgspec.structs.replace(action, phases=[*action.phases[:-1], last]))


def keep(draft: Draft, action: ActionView, course: Course) -> ActionView:
    return draft.put_action(msgspec.structs.replace(action, parameters=msgspec.to_builtins(course)))
