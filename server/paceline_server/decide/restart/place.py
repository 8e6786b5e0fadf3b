"""Phase `place` of a restart: choose the nodes of the next generation, or wait for some."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from paceline_server.decide.budget import backs_off, fruitless_restarts
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.incidents import is_fatal, live_findings
from paceline_server.decide.nodes import live_agents, quarantine, usable_nodes
from paceline_server.decide.placement import place
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    set_progress,
    update_detail,
)
from paceline_server.decide.restart.start import start_generation
from paceline_server.decide.roll_back import remember
from paceline_server.decide.stopping import repeat_stop, request_stop, unconfirmed
from paceline_server.decide.types import ActionView, NodeView, Restarted


def enter_place(draft: Draft, action: ActionView, progress: ActionProgress, detail: str) -> None:
    progress = add_lost_nodes(draft, action, progress)
    advance_place(draft, enter_phase(draft, action, progress, "place", detail))


def add_lost_nodes(draft: Draft, action: ActionView, progress: ActionProgress) -> ActionProgress:
    """Remember the excluded nodes that are silent: they are used again if no other is left.

    So are those that an earlier restart put into quarantine, once a person has released them.
    """
    quarantined = {node.agent_id for node in draft.view.nodes if node.quarantined}
    excluded = excluded_nodes(draft, action)
    lost = (excluded - live_agents(draft)) | (excluded & quarantined)
    return replace(progress, lost=sorted(lost.union(progress.lost)))


def advance_place(draft: Draft, action: ActionView) -> None:
    """Start the next generation once enough nodes are ready and the backoff is over."""
    progress = progress_of(action)
    if backs_off(draft.view, draft.policy, draft.now_ns) and not progress.is_request:
        update_detail(draft, action, backoff_text(draft))
        return
    without = excluded_nodes(draft, action)
    unsure = unconfirmed(draft, progress.stop_commands)
    for left_out, may_shrink in _choices(draft, progress, without):
        nodes = usable_nodes(draft, left_out | unsure)
        if added := {node.agent_id for node in nodes} - progress.stop_commands.keys():
            commands = progress.stop_commands | request_stop(draft, action, added)
            deadline_ns = draft.now_ns + int(draft.policy.stop_timeout_seconds * NANOSECONDS)
            progress = replace(progress, stop_commands=commands, deadline_ns=deadline_ns)
            action = set_progress(draft, action, progress)
            unsure |= added
            nodes = [node for node in nodes if node.agent_id not in added]
        layout = place(draft.view.spec.topology, nodes, draft.ranks, may_shrink=may_shrink)
        if layout is not None:
            break
    else:
        if unsure and draft.now_ns > progress.deadline_ns:
            seconds = draft.policy.stop_timeout_seconds * 2.0 ** min(progress.tries, 6)
            action = repeat_stop(draft, action, unsure, seconds)
        update_detail(draft, action, _shortage(draft, nodes))
        return
    without -= {rank.agent_id for rank in layout.ranks}
    action = replace(action, exclude_nodes=sorted(without))
    quarantine_excluded(draft, action)
    draft.restarted = Restarted(
        generation=draft.generation + 1,
        at_ns=draft.now_ns,
        highest_step=draft.view.highest_step,
        node=progress.node,
        has_saved=draft.view.has_saved,
        is_request=progress.is_request,
    )
    progress = replace(progress, highest_step=draft.view.current_step)
    draft.experience = remember(draft, action.action_id, progress)
    start_generation(draft, action, progress, layout)


def backoff_text(draft: Draft) -> str:
    """Return why the next generation does not start yet."""
    count = fruitless_restarts(draft.view, draft.policy)
    restarts = "the last restart" if count == 1 else f"the last {count} restarts"
    return f"Backing off: {restarts} made no progress."


def _choices(
    draft: Draft, progress: ActionProgress, without: set[str]
) -> Iterator[tuple[set[str], bool]]:
    """Yield (nodes to exclude, whether the job may shrink), the best choice first."""
    for count in range(len(progress.avoid), 0, -1):
        yield without | set(progress.avoid[:count]), False
    # First only healthy nodes, then also lost or released nodes that are back, then also nodes that
    # lost a GPU.
    lost = set(progress.lost)
    for readmitted in (set[str](), lost, lost | _degraded_nodes(draft)):
        yield without - readmitted, True


def excluded_nodes(draft: Draft, action: ActionView) -> set[str]:
    """Return the nodes excluded when the action began, and those found faulty since."""
    return {*action.exclude_nodes, *_faulty_nodes(draft, action)}


def quarantine_excluded(draft: Draft, action: ActionView) -> None:
    """Quarantine the nodes that the action excludes, each for its own fault where one is known."""
    faults, why = _faulty_nodes(draft, action), progress_of(action).why
    for agent in action.exclude_nodes:
        quarantine(draft, agent, faults.get(agent, why))


def _faulty_nodes(draft: Draft, action: ActionView) -> dict[str, str]:
    """Return the nodes that a fatal finding suspects, each with a summary of that finding."""
    return {
        finding.node: finding.summary
        for incident in draft.incidents()
        if action.action_id in incident.action_ids
        for finding in live_findings(incident)
        if finding.suspects_node and finding.node is not None and is_fatal(finding)
    }


def _degraded_nodes(draft: Draft) -> set[str]:
    """Return the nodes that lost a GPU but can use the others, which is better than to wait for a
    repair."""
    return {node.agent_id for node in draft.view.nodes if node.is_degraded}


def _shortage(draft: Draft, nodes: list[NodeView]) -> str:
    topology = draft.view.spec.topology
    needed = topology.world_size // topology.dp
    ready = sum(node.slots for node in nodes)
    return f"Waiting for nodes: at least {needed} slots are needed, {ready} are ready."
