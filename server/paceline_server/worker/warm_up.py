"""The warm-up after a pause of the worker, during which nothing is decided.

After a pause (a restart, a takeover, an unreachable database) every node looks silent and every
rank looks stuck. So the worker waits until each node of the job has sent a fresh batch, neither
part of a backlog nor overtaking one, or until the silent nodes have had the time of a lease to
report. Nodes that still send their backlog get more time, up to a limit.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from paceline_wire.batch import Batch

_PAUSE_NS = 2_000_000_000  # a gap between two ticks that counts as a pause ...
# ... if it is this many times as long as usual, because on a starved host all gaps are long
_PAUSE_RATIO = 3
_GAPS = 5
_BACKLOG_NS = 60_000_000_000  # upper limit: hours of backlog are sent in less
_FRESH_NS = 2_000_000_000  # a batch packed earlier is backlog (or the node's clock is wrong)


class WarmUp:
    def __init__(self, now_ns: int, grace_ns: int) -> None:
        self._grace_ns = grace_ns
        self._since_ns = now_ns
        # when the last batch of a node that still has a backlog was received
        self._behind_ns = now_ns
        self._ticked_ns = now_ns
        self._fresh: set[str] = set()
        self._done = False
        self._gaps_ns: deque[int] = deque(maxlen=_GAPS)  # intervals between the last ticks

    def skip(self) -> None:
        """End the warm-up: there was no pause."""
        self._done = True

    def begin_tick(self, now_ns: int) -> None:
        """Start the warm-up again if there was a pause since the last tick, or the clock was set
        back.

        If all ticks are slow, that is not a pause; otherwise the warm-up would never end.
        """
        gap_ns = now_ns - self._ticked_ns
        usual_ns = median_low(self._gaps_ns) if self._gaps_ns else 0
        self._gaps_ns.append(gap_ns)
        if abs(gap_ns) > max(_PAUSE_NS, _PAUSE_RATIO * usual_ns):
            self._since_ns, self._fresh, self._done = now_ns, set(), False
            self._behind_ns = now_ns
        self._ticked_ns = now_ns

    def receive(self, batch: Batch, received_ns: int) -> None:
        if batch.overtakes and received_ns - self._since_ns < _BACKLOG_NS:
            self._behind_ns = max(self._behind_ns, received_ns)
        fresh = not batch.overtakes and abs(received_ns - batch.packed_ns) < _FRESH_NS
        if fresh and received_ns >= self._since_ns:
            self._fresh.add(batch.agent_id)

    def is_done(self, agents: set[str], now_ns: int) -> bool:
        """Return whether the job's `agents` may be judged.

        The result stays true until the next pause.
        """
        if not self._done:
            waited = now_ns - self._behind_ns > self._grace_ns
            self._done = waited or agents <= self._fresh
        return self._done
