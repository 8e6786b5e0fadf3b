"""Whether the worker has listened long enough to judge anybody.

After a pause of our own (a restart, a takeover, a database that was away) every node looks silent
and every rank looks stuck. So nothing is concluded until each node of the job was heard anew, with
news from now and neither from its backlog nor ahead of it, or until the silent ones had a lease's
time to speak. Whoever still sends its backlog is given more, but not for ever.
"""

from __future__ import annotations

from paceline_wire.batch import Batch

_PAUSE_NS = 2_000_000_000  # a gap between two looks that counts as a pause
_BACKLOG_NS = 60_000_000_000  # hours of news are sent in less
_FRESH_NS = 2_000_000_000  # news packed longer ago is backlog (or the node's clock is off)


class Settling:
    def __init__(self, now_ns: int, grace_ns: int) -> None:
        self._grace_ns = grace_ns
        self._since_ns = now_ns
        self._behind_ns = now_ns  # when a node was last heard that has a backlog
        self._looked_ns = now_ns
        self._fresh: set[str] = set()
        self._settled = False

    def look(self, now_ns: int) -> None:
        """Call at the begin of each look."""
        if now_ns - self._looked_ns > _PAUSE_NS:
            self._since_ns, self._fresh, self._settled = now_ns, set(), False
            self._behind_ns = now_ns
        self._looked_ns = now_ns

    def hear(self, batch: Batch, received_ns: int) -> None:
        if batch.overtakes and received_ns - self._since_ns < _BACKLOG_NS:
            self._behind_ns = max(self._behind_ns, received_ns)
        fresh = not batch.overtakes and abs(received_ns - batch.packed_ns) < _FRESH_NS
        if fresh and received_ns >= self._since_ns:
            self._fresh.add(batch.agent_id)

    def settled(self, agents: set[str], now_ns: int) -> bool:
        """Once true it stays so until the next pause."""
        if not self._settled:
            waited = now_ns - self._behind_ns > self._grace_ns
            self._settled = waited or agents <= self._fresh
        return self._settled
