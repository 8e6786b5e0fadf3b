"""The difference between each node's clock and the server's.

A batch contains the time when it was packed, and the server records when it was received. The
smallest difference is the clock skew plus the fastest delivery. Small differences are not
corrected: nodes synchronized by NTP agree better than delivery times can measure.
"""

from __future__ import annotations

from typing import NamedTuple

# Fewer batches may all be delayed in a spool.
BATCHES_BEFORE_TRUST = 4
# A batch received before it was packed proves clock skew, if the difference exceeds scheduling
# jitter.
LARGEST_LEAD_NS = 20_000_000
# No healthy delivery takes this long every time.
LARGEST_LAG_NS = 2_000_000_000


class ReportedTime(NamedTuple):
    """The time of an event on the node's clock, and when its report was received."""

    node: str
    time_ns: int
    received_ns: int


class NodeClocks:
    """Estimates the clock skew of each node from its batches."""

    def __init__(self) -> None:
        self._smallest_ns: dict[str, int] = {}
        self._batches: dict[str, int] = {}
        self._newest_ns: dict[str, int] = {}

    def add_batch(self, node: str, packed_ns: int, received_ns: int) -> None:
        difference_ns = received_ns - packed_ns
        smallest_ns = self._smallest_ns.get(node, difference_ns)
        self._smallest_ns[node] = min(smallest_ns, difference_ns)
        self._batches[node] = self._batches.get(node, 0) + 1
        self._newest_ns[node] = difference_ns

    def lateness_ns(self, node: str) -> int:
        """Return how much longer the newest batch took than the fastest one; 0: unknown."""
        return self._newest_ns.get(node, 0) - self._smallest_ns.get(node, 0)

    def server_time_ns(self, reported: ReportedTime) -> int:
        """Return the event's time by the server's clock, at latest when its report was received.

        That is also the result while the node's clock is unknown.
        """
        if self._batches.get(reported.node, 0) < BATCHES_BEFORE_TRUST:
            return reported.received_ns
        return min(reported.time_ns + self.shift_ns(reported.node), reported.received_ns)

    def shift_ns(self, node: str) -> int:
        """Return the offset to add to the node's CLOCK_REALTIME to get the server's."""
        if self._batches.get(node, 0) < BATCHES_BEFORE_TRUST:
            return 0
        smallest_ns = self._smallest_ns[node]
        return 0 if -LARGEST_LEAD_NS <= smallest_ns <= LARGEST_LAG_NS else smallest_ns
