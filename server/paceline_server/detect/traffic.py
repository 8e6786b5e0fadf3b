"""What each link and each group of ranks took for its transfers in one step, once all were ready.

A *lane* is a pair of ranks (both directions) or a process group's collective of one kind. The two
directions of a pair are added up, because the error of two nodes' clocks, which makes one look
longer and the other shorter, then cancels out. Lanes are those seen in the first steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.steps.timing import CollectiveTimes, StepTiming, TransferTimes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEARNING_STEPS = 4  # until all lanes were seen, even when some spans are lost
_RANKS = 1 << 20
_OPS = 1 << 8


@dataclass(frozen=True, slots=True)
class Lane:
    """`ranks`: of a pair both, of a group all; `op` is None for a pair."""

    ranks: tuple[int, ...]
    op: int | None = None

    @property
    def pair(self) -> tuple[int, int] | None:
        return (self.ranks[0], self.ranks[1]) if len(self.ranks) == 2 else None


class Traffic:
    """Learns the lanes of a generation, then measures them."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self._keys: Ints = np.empty(0, dtype=np.int64)
        self._rows: Ints = np.empty(0, dtype=np.int64)  # per lane and step, when none is lost
        self._seen = 0
        self._found: dict[int, Lane] = {}

    @property
    def is_known(self) -> bool:
        return self._seen >= LEARNING_STEPS

    def learn(self, timing: StepTiming) -> None:
        for key in np.unique(_pair_keys(timing.transfers)).tolist():
            self._found.setdefault(key, Lane((key // _RANKS, key % _RANKS)))
        for key in np.unique(_group_keys(timing.collectives)).tolist():
            group, op = divmod(-key - 1, _OPS)
            members = timing.groups.get(group, ())
            if len(members) > 1:
                self._found.setdefault(key, Lane(tuple(members), op))
        self._seen += 1
        if self.is_known:
            self._keys = np.array(sorted(self._found), dtype=np.int64)
            self.lanes = [self._found[key] for key in self._keys.tolist()]
            self._rows = np.zeros(len(self.lanes), dtype=np.int64)

    def seconds(self, timing: StepTiming) -> Floats:
        """Of each lane in this step; NaN where nothing was seen of it."""
        keys = np.concatenate([_pair_keys(timing.transfers), _group_keys(timing.collectives)])
        taken = np.concatenate(
            [timing.transfers.transfer_seconds, timing.collectives.transfer_seconds]
        )
        count = len(self.lanes)
        if not keys.size or not count:
            return np.full(count, np.nan)
        place = np.minimum(np.searchsorted(self._keys, keys), count - 1)
        known = self._keys[place] == keys
        place, taken = place[known], taken[known]
        rows = np.bincount(place, minlength=count)
        self._rows = np.maximum(self._rows, rows)
        sums = np.bincount(place, taken, count)
        # Of spans that were lost, the others tell.
        mean = np.divide(sums, rows, out=np.full(count, np.nan), where=rows > 0)
        found: Floats = mean * self._rows
        return found


def _pair_keys(transfers: TransferTimes) -> Ints:
    low = np.minimum(transfers.source, transfers.destination)
    high = np.maximum(transfers.source, transfers.destination)
    keys: Ints = low * _RANKS + high
    return keys


def _group_keys(collectives: CollectiveTimes) -> Ints:
    """Below zero, so that they never meet a pair's."""
    keys: Ints = -(collectives.group * _OPS + collectives.op) - 1
    return keys
