"""The offset of the server's clock from the agent's timeline.

Each ping contains the time when it was sent. Its delay is never negative, so the largest of the
recent differences has the least delay, and is too small by that delay. No ping can be delayed for
as long as a stream may be silent: a larger apparent delay shows that the server's clock was set
back, or that this node was suspended.
"""

from __future__ import annotations

from collections import deque

from paceline_agent.clock import timeline_ns

PINGS = 30  # one minute
LONGEST_DELAY_NS = 5_000_000_000  # a stream that is silent for longer is closed


class ServerClock:
    """An estimate of the server's clock from the pings of the command stream."""

    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=PINGS)

    def add_ping(self, server_ns: int) -> None:
        """Take a ping that was just received and was sent at `server_ns` (server's clock)."""
        difference_ns = server_ns - timeline_ns()
        if max(self._differences_ns, default=difference_ns) - difference_ns > LONGEST_DELAY_NS:
            self._differences_ns.clear()
        self._differences_ns.append(difference_ns)

    @property
    def offset_seconds(self) -> float | None:
        """Server's time minus the agent's timeline; None before the first ping."""
        return max(self._differences_ns) / 1e9 if self._differences_ns else None
