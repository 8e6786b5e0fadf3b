"""A spare node that has imported the job's modules before it is needed.

After the loss of a node, its ranks are then forked there, as on the other nodes. The spare is the
node that would take over the last rank's; the command is repeated, because the fork server of a
node without ranks ends after a while, and another job may have taken the spare.
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.nodes import is_progressing, usable_nodes
from paceline_server.decide.placement import place
from paceline_server.decide.restart.start import issue_to_ranks
from paceline_wire.commands import PRELOAD, PreloadRanks

_REPEAT_NS = 600 * NANOSECONDS  # a fork server without ranks ends after 900 s
_RETRY_NS = 30 * NANOSECONDS  # while there is no spare


def keep_spare_warm(draft: Draft) -> None:
    """Send the command if it is due. The policy's mode must allow restarts."""
    if not _preloads(draft) or draft.state != "running":
        return
    is_due = draft.is_due(draft.experience.spare_due_ns, _REPEAT_NS)
    if not is_due or draft.actions("running") or not is_progressing(draft):
        return
    last = max(draft.ranks, key=lambda rank: rank.rank).agent_id
    is_warm = preload_without(draft, "", {last}, may_shrink=False)
    wait_ns = _REPEAT_NS if is_warm else _RETRY_NS
    draft.experience = replace(draft.experience, spare_due_ns=draft.now_ns + wait_ns)


def preload_without(
    draft: Draft, action_id: str, without: set[str], *, may_shrink: bool = True
) -> bool:
    """Have the nodes that take over the ranks of others import the job's modules.

    Return whether there are any; False if the job does not ask for it.
    """
    if not _preloads(draft):
        return False
    nodes = usable_nodes(draft, without)
    layout = place(draft.view.spec.topology, nodes, draft.ranks, may_shrink=may_shrink)
    if layout is None:
        return False
    new = {rank.agent_id for rank in layout.ranks} - {rank.agent_id for rank in draft.ranks}
    issue_to_ranks(draft, action_id, PreloadRanks, layout, sorted(new))
    return bool(new)


def _preloads(draft: Draft) -> bool:
    return PRELOAD in draft.view.spec.environment
