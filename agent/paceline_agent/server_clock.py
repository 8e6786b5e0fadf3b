"""How far the server's clock is from the agent's timeline.

Each ping says when it was sent. Its way takes time, never less than none: the largest of the last
differences is the one that was delayed least, and short of the truth by that delay.
"""

from __future__ import annotations

from collections import deque

from paceline_agent.clock import timeline_ns

PINGS = 60  # a minute of them


class ServerClock:
    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=PINGS)

    def see(self, server_ns: int) -> None:
        """A ping that was sent at `server_ns` has just come."""
        self._differences_ns.append(server_ns - timeline_ns())

    @property
    def offset_seconds(self) -> float | None:
        """Add it to the agent's time to get the server's; None before the first ping."""
        return max(self._differences_ns) / 1e9 if self._differences_ns else None
