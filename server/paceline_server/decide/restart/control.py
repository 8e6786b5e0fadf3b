"""Control commands to the ranks: save an agreed step and stop, or no longer do so."""

from __future__ import annotations

from paceline_server.decide.draft import Draft
from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.types import ActionView
from paceline_wire.commands import Command, ControlRanks


def control_ranks(draft: Draft, action: ActionView, kind: str, target: int) -> dict[str, int]:
    """Send a control command to all ranks. Return {agent_id: command_id}."""

    def control(command_id: int) -> Command:
        return ControlRanks(
            command_id=command_id,
            job=draft.view.job_id,
            generation=draft.generation,
            kind=kind,
            target_step=target,
        )

    agents = sorted({rank.agent_id for rank in draft.ranks})
    return {agent: draft.issue(agent, action.action_id, control) for agent in agents}


def have_canceled(draft: Draft, progress: ActionProgress) -> bool:
    """Return whether all ranks have confirmed that they no longer follow the command."""
    ids = set(progress.cancel_commands.values())
    confirmed = {
        result.rank
        for result in draft.view.acknowledged
        if result.command_id in ids and result.status != "seen"
    }
    return len(confirmed) >= len(draft.ranks)
