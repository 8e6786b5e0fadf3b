"""What each link and each group of ranks took for its transfers in one step, once all were ready.

A *lane* is a pair of ranks (both directions) or a process group's collective of one kind. The two
directions of a pair are added up, because the error of two nodes' clocks, which makes one look
longer and the other shorter, then cancels out.

Lanes that appear together make a *family*, with a past that counts only the steps in which it was
seen: so those that come later (another phase of the job, a rare collective) are measured as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.steps.timing import CollectiveTimes, StepTiming, TransferTimes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEARNING_STEPS = 4  # until all lanes were seen, even when some spans are lost
OFTEN = 0.75  # of the steps in which its family is seen
MOST_FAMILIES = 8  # what sends to anyone at any time has no past to be judged by
_RANKS = 1 << 20
_OPS = 1 << 8


@dataclass(frozen=True, slots=True)
class TransferLane:
    """`ranks`: of a pair both, of a group all; `op` is None for a pair."""

    ranks: tuple[int, ...]
    op: int | None = None

    @property
    def pair(self) -> tuple[int, int] | None:
        return (self.ranks[0], self.ranks[1]) if len(self.ranks) == 2 else None


class Family:
    """Lanes that came up in the same steps; `lanes` is empty until they are known.

    `every`: steps from one sighting to the next.
    """

    def __init__(self) -> None:
        self.lanes: list[TransferLane] = []
        self.every = 1.0
        self._found: dict[int, TransferLane] = {}
        self._sightings: dict[int, int] = {}
        self._seen = 0
        self._first_step, self._last_step = 0, 0

    def learn(self, keys: Ints, timing: StepTiming) -> None:
        """One step in which `keys`, of no other family, were seen."""
        for key in np.unique(keys).tolist():
            if key not in self._found:
                self._found[key] = _lane(key, timing)
            self._sightings[key] = self._sightings.get(key, 0) + 1
        if not self._seen:
            self._first_step = timing.step
        self._last_step = timing.step
        self._seen += 1

    def settle(self) -> Ints | None:
        """Its keys, once enough was seen; lanes that are seen less often belong to another."""
        if self._seen < LEARNING_STEPS:
            return None
        often = [key for key, times in self._sightings.items() if times >= OFTEN * self._seen]
        kept = sorted(key for key in often if len(self._found[key].ranks) > 1)
        self.lanes = [self._found[key] for key in kept]
        self.every = (self._last_step - self._first_step) / (self._seen - 1)
        return np.array(kept, dtype=np.int64)


class TransferBaselines:
    """Learns the families of a generation, then measures them."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self._forming, self._formed = Family(), 0
        self._keys: Ints = np.empty(0, dtype=np.int64)  # of all families, ascending
        self._places: Ints = np.empty(0, dtype=np.int64)  # of each among all lanes
        self._rows: Ints = np.empty(0, dtype=np.int64)  # per lane and step, when none is lost

    def seconds(self, timing: StepTiming) -> list[Floats]:
        """Of each lane of each family in this step; NaN where nothing was seen of it."""
        keys = np.concatenate([_pair_keys(timing.transfers), _group_keys(timing.collectives)])
        taken = np.concatenate(
            [timing.transfers.transfer_seconds, timing.collectives.transfer_seconds]
        )
        at = np.minimum(np.searchsorted(self._keys, keys), max(self._keys.size - 1, 0))
        known = self._keys[at] == keys if self._keys.size else np.zeros(keys.size, dtype=np.bool_)
        found = self._measured(self._places[at[known]], taken[known])
        if self._formed < MOST_FAMILIES and not known.all():
            self._learn(keys[~known], timing)
        return found

    def _measured(self, place: Ints, taken: Floats) -> list[Floats]:
        count = self._rows.size
        rows = np.bincount(place, minlength=count)
        self._rows = np.maximum(self._rows, rows)
        sums = np.bincount(place, taken, count)
        # Of spans that were lost, the others tell.
        mean = np.divide(sums, rows, out=np.full(count, np.nan), where=rows > 0)
        ends = np.cumsum([len(family.lanes) for family in self.families])
        return np.split(mean * self._rows, ends[:-1]) if self.families else []

    def _learn(self, keys: Ints, timing: StepTiming) -> None:
        self._forming.learn(keys, timing)
        settled = self._forming.settle()
        if settled is None:
            return
        if settled.size:
            self._add(self._forming, settled)
        self._forming, self._formed = Family(), self._formed + 1

    def _add(self, family: Family, keys: Ints) -> None:
        first = self._rows.size
        together = np.concatenate([self._keys, keys])
        places = np.concatenate([self._places, np.arange(first, first + keys.size)])
        order = np.argsort(together)
        self._keys, self._places = together[order], places[order]
        self._rows = np.concatenate([self._rows, np.zeros(keys.size, dtype=np.int64)])
        self.families.append(family)


def _lane(key: int, timing: StepTiming) -> TransferLane:
    if key >= 0:
        return TransferLane((key // _RANKS, key % _RANKS))
    group, op = divmod(-key - 1, _OPS)
    return TransferLane(tuple(timing.groups.get(group, ())), op)


def _pair_keys(transfers: TransferTimes) -> Ints:
    low = np.minimum(transfers.source, transfers.destination)
    high = np.maximum(transfers.source, transfers.destination)
    keys: Ints = low * _RANKS + high
    return keys


def _group_keys(collectives: CollectiveTimes) -> Ints:
    """Below zero, so that they never meet a pair's."""
    keys: Ints = -(collectives.group * _OPS + collectives.op) - 1
    return keys
