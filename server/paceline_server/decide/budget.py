"""Limits of repairs: how often and how soon a job is restarted, how many nodes are quarantined.

The clock may have been set back since a restart: spans count in both directions.
"""

from __future__ import annotations

from paceline_server.decide.draft import NANOSECONDS
from paceline_server.decide.types import JobView, NodeView
from paceline_server.policy import Policy

HOUR_NS = 3600 * NANOSECONDS
DAY_NS = 24 * HOUR_NS
_PATIENCE_GROWTH = 4.0
_MOST_GROWTHS = 8  # a policy may allow a thousand restarts without progress


def fruitless_restarts(view: JobView, policy: Policy) -> int:
    """Return how many of the latest restarts led to no new step; those that people requested do
    not count.

    Steps of a script that numbers none may start at 0 in each generation. If it is declared to
    resume (policy `resumes`), a checkpoint of the new generation is progress as well.
    """
    count = 0
    reached, has_saved = view.highest_step, view.has_saved
    for restart in reversed(view.restarts):
        if _step(reached) > _step(restart.highest_step) or (has_saved and policy.resumes == "yes"):
            break
        count += not restart.is_request
        reached, has_saved = restart.highest_step, restart.has_saved
    return count


def refusal(view: JobView, policy: Policy, now_ns: int) -> str | None:
    """Return why the job may not be restarted once more; None if it may."""
    fruitless = fruitless_restarts(view, policy)
    if fruitless >= policy.cycles_without_progress:
        return f"the last {fruitless} restarts made no progress"
    for span_ns, limit, word in (
        (HOUR_NS, policy.restarts_per_hour, "hour"),
        (DAY_NS, policy.restarts_per_day, "day"),
    ):
        used = sum(
            abs(now_ns - restart.at_ns) < span_ns and not restart.is_request
            for restart in view.restarts
        )
        if used >= limit:
            return f"{used} restarts within the last {word}; {limit} are allowed"
    return None


def backs_off(view: JobView, policy: Policy, now_ns: int) -> bool:
    """Return whether the next generation may not start yet: longer after each restart without
    progress."""
    fruitless = fruitless_restarts(view, policy)
    if not fruitless:
        return False
    delay = min(policy.backoff_seconds * 2.0 ** (fruitless - 1), policy.backoff_maximum_seconds)
    return abs(now_ns - view.restarts[-1].at_ns) < int(delay * NANOSECONDS)


def hang_patience_seconds(view: JobView, policy: Policy) -> float:
    """Return how long a hang may last before a restart: longer after each one without progress.

    The script may pause there by design, for longer than the policy's patience.
    """
    growth = _PATIENCE_GROWTH ** min(fruitless_restarts(view, policy), _MOST_GROWTHS)
    return policy.hang_patience_seconds * growth


def times_to_blame(view: JobView, node: str, now_ns: int) -> int:
    """Return for how many restarts of the last hour this node was to blame."""
    return sum(
        restart.node == node and abs(now_ns - restart.at_ns) < HOUR_NS for restart in view.restarts
    )


def nodes_to_blame(view: JobView, now_ns: int) -> list[str]:
    """Return the nodes that were to blame for a restart within the last hour, the latest first."""
    return [
        restart.node
        for restart in reversed(view.restarts)
        if restart.node is not None and abs(now_ns - restart.at_ns) < HOUR_NS
    ]


def may_quarantine(nodes: list[NodeView], policy: Policy, chosen: int, now_ns: int) -> bool:
    """Return whether one more node may be quarantined, in addition to those already `chosen`.

    At least one may, even in the smallest cluster, unless the share is 0. Whether other nodes can
    take over is not checked here. Silent nodes do not count, because they cannot be used anyway:
    the store has also those that left the cluster long ago.
    """
    living = [node for node in nodes if alive(node, policy, now_ns)]
    quarantined = sum(node.quarantined for node in living)
    limit = max(1.0, policy.quarantine_share * len(living)) if policy.quarantine_share else 0.0
    return quarantined + chosen + 1 <= limit


def alive(node: NodeView, policy: Policy, now_ns: int) -> bool:
    """Return whether the node was last seen within its lease (docs/adr/0003)."""
    return now_ns - node.last_seen_ns <= policy.node_lease_seconds * NANOSECONDS


def _step(step: int | None) -> int:
    return -1 if step is None else step
