"""Stop the ranks of a generation, with a confirmation from each node.

A node counts as stopped when its agent confirms it or when its lease has lapsed: an agent that
cannot reach the server for that long kills its ranks by itself.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.nodes import live_agents
from paceline_server.decide.progress import progress_of, set_progress
from paceline_server.decide.types import ActionView
from paceline_wire.commands import Command, StopGeneration


def request_stop(
    draft: Draft,
    action: ActionView,
    agents: set[str],
    *,
    grace_seconds: float = 0.0,
    renew: bool = False,
) -> dict[str, int]:
    """Have each of `agents` kill the ranks of the current and all earlier generations.

    Args:
        renew: keep ranks that can leave their generation, except on excluded nodes.

    Returns:
        {agent_id: command_id}.
    """

    def stop(agent: str, command_id: int) -> Command:
        return StopGeneration(
            command_id=command_id,
            job=draft.view.job_id,
            generation=draft.generation,
            grace_seconds=grace_seconds,
            renew=renew and agent not in action.exclude_nodes,
        )

    return {
        agent: draft.issue(agent, action.action_id, partial(stop, agent))
        for agent in sorted(agents)
    }


def agents_of_generation(draft: Draft) -> set[str]:
    """Return the agents that run ranks of the job, and those that the store assigns to it."""
    assigned = {node.agent_id for node in draft.view.nodes if node.job == draft.view.job_id}
    return assigned | {rank.agent_id for rank in draft.ranks}


def unconfirmed(draft: Draft, commands: dict[str, int]) -> set[str]:
    """Return the agents that may still run ranks: alive, and stop not confirmed."""
    living = live_agents(draft)
    results = draft.view.command_results
    return {
        agent
        for agent, command_id in commands.items()
        if agent in living and not results.get(command_id, False)
    }


def repeat_stop(
    draft: Draft, action: ActionView, waiting: set[str], seconds: float | None = None
) -> ActionView:
    """Send the stop command again, under a new id: agents carry out each id once.

    Args:
        seconds: time until the next repetition; None: the policy's stop timeout.
    """
    progress = progress_of(action)
    commands = progress.stop_commands | request_stop(draft, action, waiting)
    timeout_ns = int((seconds or draft.policy.stop_timeout_seconds) * NANOSECONDS)
    progress = replace(
        progress,
        stop_commands=commands,
        tries=progress.tries + 1,
        deadline_ns=draft.now_ns + timeout_ns,
    )
    return set_progress(draft, action, progress)
