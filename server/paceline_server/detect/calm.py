"""How long a reported problem has been absent: a short pause does not end it."""

from __future__ import annotations


class Calm:
    """The time since a reported problem was last seen.

    A problem that comes and goes would otherwise be an incident each time.
    """

    def __init__(self, seconds: float) -> None:
        self._needed_ns = round(seconds * 1e9)
        self._since_ns: int | None = None

    def ends(self, *, is_absent: bool, now_ns: int) -> bool:
        """Return whether the problem is over: absent now, and for so many seconds."""
        if not is_absent:
            self._since_ns = None
            return False
        if self._since_ns is None:
            self._since_ns = now_ns
        if now_ns - self._since_ns < self._needed_ns:
            return False
        self._since_ns = None
        return True
