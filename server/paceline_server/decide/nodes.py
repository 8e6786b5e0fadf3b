"""The current state of the job's nodes and ranks: silent, usable, or with a fatal finding."""

from __future__ import annotations

from paceline_server.decide.budget import alive
from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import is_fatal, live_findings
from paceline_server.decide.types import NodeView
from paceline_server.detect.finding import Finding


def usable_nodes(draft: Draft, without: set[str]) -> list[NodeView]:
    """Return the nodes that can be assigned ranks of this job now."""
    return [
        node
        for node in draft.view.nodes
        if node.agent_id not in without
        and node.agent_id not in draft.quarantine
        and not node.quarantined
        and node.job in (None, draft.view.job_id)
        and alive(node, draft.policy, draft.now_ns)
    ]


def live_agents(draft: Draft) -> set[str]:
    """Return all agents whose lease has not lapsed."""
    return {node.agent_id for node in draft.view.nodes if alive(node, draft.policy, draft.now_ns)}


def silent_agents(draft: Draft) -> set[str]:
    """Return the agents of the generation whose lease has lapsed.

    If all of several agents are silent, the fault is between them and the server, and none is
    returned.
    """
    agents = {rank.agent_id for rank in draft.ranks}
    silent = agents - live_agents(draft)
    return silent if silent != agents or len(agents) == 1 else set()


def fatal_findings(draft: Draft) -> list[Finding]:
    """Return the open findings that show that this generation no longer trains."""
    return [
        finding
        for incident in draft.incidents()
        for finding in live_findings(incident)
        if finding.generation == draft.generation and is_fatal(finding)
    ]


def is_progressing(draft: Draft) -> bool:
    """Return whether all ranks run and make progress, and their nodes respond."""
    return bool(draft.ranks) and not has_stopped(draft) and not silent_agents(draft)


def has_stopped(draft: Draft) -> bool:
    """Return whether the generation no longer trains.

    A silent agent is not enough, because its ranks may train: a lost node is a fatal finding.
    """
    return (
        draft.view.highest_step is None
        or any(rank.state == "exited" for rank in draft.ranks)
        or bool(fatal_findings(draft))
    )


def has_failed(draft: Draft) -> bool:
    """Return whether the generation no longer trains, and not because it has finished."""
    exited = any(rank.state == "exited" for rank in draft.ranks)
    return bool(fatal_findings(draft)) or (exited and not is_finishing(draft))


def is_finishing(draft: Draft) -> bool:
    """Return whether ranks have ended, all of them well, as at the end of a training."""
    exited = [rank for rank in draft.ranks if rank.state == "exited"]
    is_well = all(rank.exit_code == 0 and not rank.commanded for rank in exited)
    return bool(exited) and is_well and not fatal_findings(draft)


def quarantine(draft: Draft, agent: str, why: str) -> None:
    """Assign no ranks to the node until a person releases it."""
    node = next((node for node in draft.view.nodes if node.agent_id == agent), None)
    if node is not None and not node.quarantined and agent not in draft.quarantine:
        draft.quarantine[agent] = why
        draft.audit("policy", "quarantined", agent, why)
