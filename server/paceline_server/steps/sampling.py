"""Which steps are analyzed: all, unless they are so short that their analysis would take too long.

Of short steps one in each `ANALYZED_SECONDS` is analyzed, at a random place among those that it
stands for, so that nothing that comes in every tenth step is always seen or never. Steps that take
`LONG_SECONDS` are always analyzed, such as those with an evaluation. In the ledger, the others
count like the next analyzed one.
"""

from __future__ import annotations

from collections import deque

from paceline_server.medians import median

ANALYZED_SECONDS = 0.04  # the analysis of a step of two ranks takes about 0.008 s
LONG_SECONDS = 0.25
_RECENT_STEPS = 64
_LARGEST_GROUP = 64
# Knuth's multiplicative hash spreads consecutive numbers.
_FACTOR = 2654435761


class StepSampler:
    """Decides for each step of a generation, in order."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._seen = 0
        self._group = 1  # steps of which one is analyzed
        self._skipped, self._skipped_seconds = 0, 0.0

    def takes(self, step: int, seconds: float) -> bool:
        """Return whether to analyze a step of this length."""
        self._recent.append(seconds)
        self._seen += 1
        if self._seen % _RECENT_STEPS == 0:
            fitting = ANALYZED_SECONDS / max(median(self._recent), 1e-9)
            self._group = int(min(max(fitting, 1.0), _LARGEST_GROUP))
        taken = (step // self._group * _FACTOR >> 8) % self._group == step % self._group
        if taken or seconds >= LONG_SECONDS:
            return True
        self._skipped += 1
        self._skipped_seconds += seconds
        return False

    def take_skipped(self) -> tuple[int, float]:
        """Return how many steps were left out since the last call, and the seconds they took."""
        skipped = self._skipped, self._skipped_seconds
        self._skipped, self._skipped_seconds = 0, 0.0
        return skipped
