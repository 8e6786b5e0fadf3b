"""Spells of a problem that comes and goes."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

RECENT_STEPS = 2048  # older spells do not count
LEAST_SPELLS = 3  # fewer are no pattern
GAPS = 2  # multiple of the longest gap between spells after which the problem is over


class Spells:
    """The recent spells of one problem: add each when it has ended, then read.

    >>> spells = Spells()
    >>> for onset in (0, 120, 240):
    ...     spells.add(onset, onset + 60)
    >>> spells.recur, spells.share, spells.over_at
    (True, 0.5, 420)
    """

    def __init__(self) -> None:
        self._spells: deque[tuple[int, int]] = deque()  # onset, and the step in which it was over

    def add(self, onset: int, end: int) -> None:
        self._spells.append((onset, end))
        while self._spells[0][1] < end - RECENT_STEPS:
            self._spells.popleft()

    def __len__(self) -> int:
        return len(self._spells)

    @property
    def recur(self) -> bool:
        return len(self._spells) >= LEAST_SPELLS

    @property
    def onset(self) -> int:
        return self._spells[0][0]

    @property
    def share(self) -> float:
        """Return the share of the steps from the first to the newest onset that are slow."""
        *earlier, (newest, _) = self._spells
        return sum(end - onset for onset, end in earlier) / max(newest - self.onset, 1)

    @property
    def over_at(self) -> int:
        """Return the step from which it has been away for clearly longer than between spells."""
        spells = list(self._spells)
        gaps = [later - end for (_, end), (later, _) in pairwise(spells)]
        return spells[-1][1] + GAPS * max(gaps, default=0)
