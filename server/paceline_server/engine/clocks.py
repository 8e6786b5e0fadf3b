"""How far each node's clock is from the server's.

A batch says when it was packed and the server when it came: the smallest difference ever seen is
the skew plus the fastest delivery. Small differences are left alone, for nodes that keep time by
NTP agree better among themselves than delivery times can tell.
"""

from __future__ import annotations

from typing import NamedTuple

# Fewer batches may all come from a spool that was held up.
BATCHES_BEFORE_TRUST = 4
# A batch that comes before it was packed proves skew; more than scheduling jitter must.
LARGEST_LEAD_NS = 20_000_000
# No healthy delivery takes this long every time.
LARGEST_LAG_NS = 2_000_000_000


class Told(NamedTuple):
    """Of something that a node told of, when it was by the node's clock and when it was heard."""

    node: str
    time_ns: int
    received_ns: int


class NodeClocks:
    def __init__(self) -> None:
        self._smallest_ns: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self._newest_ns: dict[str, int] = {}

    def see(self, node: str, packed_ns: int, received_ns: int) -> None:
        difference_ns = received_ns - packed_ns
        known = self._smallest_ns.get(node, difference_ns)
        self._smallest_ns[node] = min(known, difference_ns)
        self._batches[node] = self._batches.get(node, 0) + 1
        self._newest_ns[node] = difference_ns

    def lateness_ns(self, node: str) -> int:
        """How much longer the newest batch was under way than the fastest one; 0: not known."""
        return self._newest_ns.get(node, 0) - self._smallest_ns.get(node, 0)

    def when_ns(self, told: Told) -> int:
        """By the server's clock; when it was heard of while the node's clock is not known."""
        if self._batches.get(told.node, 0) < BATCHES_BEFORE_TRUST:
            return told.received_ns
        return min(told.time_ns + self.shift_ns(told.node), told.received_ns)

    def shift_ns(self, node: str) -> int:
        """Add this to the node's CLOCK_REALTIME to get the server's."""
        if self._batches.get(node, 0) < BATCHES_BEFORE_TRUST:
            return 0
        smallest_ns = self._smallest_ns[node]
        return 0 if -LARGEST_LEAD_NS <= smallest_ns <= LARGEST_LAG_NS else smallest_ns
