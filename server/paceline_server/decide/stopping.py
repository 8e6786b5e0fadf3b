"""Stopping a generation for certain: asked, confirmed node by node, asked again.

A node counts as stopped when its agent says so or when its lease has lapsed: an agent that
cannot reach the server for that long kills its ranks by itself.
"""

from __future__ import annotations

import msgspec

from paceline_server.decide.budget import alive
from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import resolve
from paceline_server.decide.progress import Course, course_of, enter, explain, keep
from paceline_server.decide.types import ActionView, JobState
from paceline_wire.commands import Command, StopGeneration

USER_GRACE_SECONDS = 2.0  # a person's stop lets the ranks end cleanly; a repair does not wait
TRIES = 3


def ask(
    draft: Draft, action: ActionView, agents: set[str], *, grace_seconds: float = 0.0
) -> dict[str, int]:
    """Have each of `agents` kill the current generation and all before it."""

    def stop(command_id: int) -> Command:
        return StopGeneration(
            command_id=command_id,
            job=draft.view.job_id,
            generation=draft.generation,
            grace_seconds=grace_seconds,
        )

    return {agent: draft.issue(agent, action.action_id, stop) for agent in sorted(agents)}


def agents_of_generation(draft: Draft) -> set[str]:
    """Agents that hold ranks of the job, and those the store still counts as its own."""
    holding = {node.agent_id for node in draft.view.nodes if node.job == draft.view.job_id}
    return holding | {rank.agent_id for rank in draft.ranks}


def unconfirmed(draft: Draft, commands: dict[str, int]) -> set[str]:
    """Agents that may still run ranks: alive and without a good answer."""
    living = {node.agent_id for node in draft.view.nodes if alive(node, draft.policy, draft.now_ns)}
    results = draft.view.command_results
    return {
        agent
        for agent, command_id in commands.items()
        if agent in living and not results.get(command_id, False)
    }


def ask_again(
    draft: Draft, action: ActionView, waiting: set[str], seconds: float | None = None
) -> ActionView:
    """Agents carry out each id once, so a command that failed is repeated under a new one.

    `seconds`: until they may be asked once more; None: as the policy has it.
    """
    course = course_of(action)
    commands = course.stop_commands | ask(draft, action, waiting)
    timeout_ns = int((seconds or draft.policy.stop_timeout_seconds) * 1e9)
    course = msgspec.structs.replace(
        course,
        stop_commands=commands,
        tries=course.tries + 1,
        deadline_ns=draft.now_ns + timeout_ns,
    )
    return keep(draft, action, course)


def begin_stop(draft: Draft, ends_as: JobState, reason: str, incident_id: str | None) -> ActionView:
    """End the job: as "stopped" by people, as "failed" by policy."""
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
    # Nodes put aside may hold ranks that never confirmed their death: a last chance to end them.
    aside = {node.agent_id for node in draft.view.nodes if node.quarantined}
    agents = agents_of_generation(draft) | aside if draft.generation else set[str]()
    grace_seconds = USER_GRACE_SECONDS if ends_as == "stopped" else 0.0
    commands = ask(draft, action, agents, grace_seconds=grace_seconds)
    return enter(
        draft,
        action,
        Course(ends_as=ends_as, stop_commands=commands),
        "stop",
        f"Stopping the ranks on {names(agents)}." if agents else "No ranks to stop.",
        seconds=draft.policy.stop_timeout_seconds + grace_seconds,
    )


def advance_stop(draft: Draft, action: ActionView) -> None:
    """Until every node has confirmed, or was asked in vain three times."""
    course = course_of(action)
    waiting = unconfirmed(draft, course.stop_commands)
    ends_as: JobState = course.ends_as or "stopped"
    if not waiting:
        draft.end_action(action, "done", verb="finished")
        _end(draft, ends_as, action.reason)
    elif draft.now_ns > course.deadline_ns and course.tries >= TRIES:
        error = f"{names(waiting)} did not confirm that the ranks are dead; look there."
        draft.end_action(action, "failed", error=error)
        _end(draft, ends_as, f"{action.reason} {error}")
    elif draft.now_ns > course.deadline_ns:
        action = ask_again(draft, action, waiting)
        explain(draft, action, f"Waiting for {names(waiting)} to confirm, asked again.")


def _end(draft: Draft, ends_as: JobState, why: str) -> None:
    """A failed job keeps its incidents: they say what it died of."""
    for incident in draft.incidents():
        if ends_as == "stopped":
            resolve(draft, incident, "The job was stopped.")
        elif incident.state == "mitigating":
            draft.put_incident(msgspec.structs.replace(incident, state="open"))
    draft.change_state(ends_as, why)


def names(agents: set[str]) -> str:
    """For people: "node-1, node-2 and node-3"."""
    ordered = sorted(agents)
    if len(ordered) < 2:
        return "".join(ordered)
    return f"{', '.join(ordered[:-1])} and {ordered[-1]}"
