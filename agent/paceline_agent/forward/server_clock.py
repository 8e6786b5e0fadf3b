"""How far the server's clock is from the agent's timeline.

Each ping says when it was sent. Its way takes time, never less than none: the largest of the last
differences is the one that was delayed least, and short of the truth by that delay. No ping is
under way for as long as a stream may be silent: one that seems to be shows that the server's clock
was set back, or that this node was suspended.
"""

from __future__ import annotations

from collections import deque

from paceline_agent.clock import timeline_ns

PINGS = 30  # a minute of them
LONGEST_DELAY_NS = 5_000_000_000  # a stream that is silent for longer is given up


class ServerClock:
    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=PINGS)

    def see(self, server_ns: int) -> None:
        """A ping that was sent at `server_ns` has just come."""
        difference_ns = server_ns - timeline_ns()
        if max(self._differences_ns, default=difference_ns) - difference_ns > LONGEST_DELAY_NS:
            self._differences_ns.clear()
        self._differences_ns.append(difference_ns)

    @property
    def offset_seconds(self) -> float | None:
        """Add it to the agent's time to get the server's; None before the first ping."""
        return max(self._differences_ns) / 1e9 if self._differences_ns else None
