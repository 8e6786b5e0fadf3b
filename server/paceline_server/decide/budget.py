"""How often a job may be restarted, how fast, and how many nodes may be put aside."""

from __future__ import annotations

from paceline_server.decide.draft import NANOSECONDS
from paceline_server.decide.types import JobView, NodeView
from paceline_server.policy import Policy

HOUR_NS = 3600 * NANOSECONDS
DAY_NS = 24 * HOUR_NS


def fruitless_restarts(view: JobView) -> int:
    """How many of the latest restarts led to no step beyond what was reached before them."""
    count = 0
    reached = view.highest_step
    for restart in reversed(view.restarts):
        if _step(reached) > _step(restart.highest_step):
            break
        count += 1
        reached = restart.highest_step
    return count


def refusal(view: JobView, policy: Policy, now_ns: int) -> str | None:
    """Why the job may not be restarted once more; None if it may."""
    fruitless = fruitless_restarts(view)
    if fruitless >= policy.cycles_without_progress:
        return f"the last {fruitless} restarts made no step of progress"
    for span_ns, limit, word in (
        (HOUR_NS, policy.restarts_per_hour, "hour"),
        (DAY_NS, policy.restarts_per_day, "day"),
    ):
        used = sum(now_ns - restart.at_ns < span_ns for restart in view.restarts)
        if used >= limit:
            return f"{used} restarts within the last {word}, and {limit} are allowed"
    return None


def not_before_ns(view: JobView, policy: Policy) -> int:
    """When the next generation may start: at once after progress, else later each time."""
    fruitless = fruitless_restarts(view)
    if not fruitless:
        return 0
    delay = min(policy.backoff_seconds * 2.0 ** (fruitless - 1), policy.backoff_maximum_seconds)
    return view.restarts[-1].at_ns + int(delay * NANOSECONDS)


def times_to_blame(view: JobView, node: str, now_ns: int) -> int:
    """How many restarts of the last hour this node was held responsible for."""
    return sum(
        restart.node == node and now_ns - restart.at_ns < HOUR_NS for restart in view.restarts
    )


def may_quarantine(nodes: list[NodeView], policy: Policy, aside: int, now_ns: int) -> bool:
    """Whether one more node may be put aside, `aside` being already decided for.

    One may in the smallest cluster, unless the share is 0: whether others can take over is asked
    elsewhere.
    Nodes that have fallen silent do not count as put aside: nothing is gained by keeping them.
    """
    held = sum(node.quarantined and alive(node, policy, now_ns) for node in nodes)
    limit = max(1.0, policy.quarantine_share * len(nodes)) if policy.quarantine_share else 0.0
    return held + aside + 1 <= limit


def alive(node: NodeView, policy: Policy, now_ns: int) -> bool:
    """Heard of within its lease (docs/adr/0003)."""
    return now_ns - node.last_seen_ns <= policy.node_lease_seconds * NANOSECONDS


def _step(step: int | None) -> int:
    return -1 if step is None else step
