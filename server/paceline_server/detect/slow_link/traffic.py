"""Transfer seconds of each link and process group in one step, once all ranks were ready.

A *lane* is a pair of ranks (both directions) or a process group's collective of one kind. The two
directions of a pair are summed: an error between two nodes' clocks makes one longer and the other
shorter, and cancels out in the sum.

Lanes that appear together form a *family*. Its past contains only the steps in which it was seen,
so lanes that appear later (another phase of the job, a rare collective) are measured as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.steps.timing import CollectiveTimes, StepTiming, TransferTimes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEARNING_STEPS = 4  # steps until all lanes have been seen, even if some spans are lost
OFTEN = 0.75  # share of its family's steps in which a lane must be seen
# limit: ranks that send to any other rank at any time have no past to compare with
MOST_FAMILIES = 8
MOST_VOTES = 8  # steps after which another number of transfers per step counts as usual
_RANKS = 1 << 20
_OPS = 1 << 8


@dataclass(frozen=True, slots=True)
class TransferLane:
    """A pair of ranks, or all ranks of a group with the operation of their collective.

    Without an operation, more than two ranks are all that communicate between nodes.
    """

    ranks: tuple[int, ...]
    op: int | None = None

    @property
    def pair(self) -> tuple[int, int] | None:
        return (self.ranks[0], self.ranks[1]) if len(self.ranks) == 2 else None


class Family:
    """Lanes that appear in the same steps; `lanes` is empty until they are known.

    `every`: mean steps from one appearance to the next.
    """

    def __init__(self) -> None:
        self.lanes: list[TransferLane] = []
        self.every = 1.0
        self._found: dict[int, TransferLane] = {}
        self._appearances: dict[int, int] = {}
        self._seen = 0
        self._first_step, self._last_step = 0, 0

    def learn(self, keys: Ints, timing: StepTiming) -> None:
        """Learn from a step with `keys` that belong to no other family."""
        for key in np.unique(keys).tolist():
            if key not in self._found:
                self._found[key] = _lane(key, timing)
            self._appearances[key] = self._appearances.get(key, 0) + 1
        if not self._seen:
            self._first_step = timing.step
        self._last_step = timing.step
        self._seen += 1

    def finish(self) -> Ints | None:
        """Return its keys; None while too few steps were seen.

        Rarer lanes belong to another family.
        """
        if self._seen < LEARNING_STEPS:
            return None
        often = [key for key, times in self._appearances.items() if times >= OFTEN * self._seen]
        keys = sorted(key for key in often if len(self._found[key].ranks) > 1)
        self.lanes = [self._found[key] for key in keys]
        self.every = (self._last_step - self._first_step) / (self._seen - 1)
        return np.array(keys, dtype=np.int64)


class TransferBaselines:
    """The families of a generation: learned from its first steps, then measured."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self._forming, self._formed = Family(), 0
        self._keys: Ints = np.empty(0, dtype=np.int64)  # keys of all families, ascending
        self._places: Ints = np.empty(0, dtype=np.int64)  # position of each key among all lanes
        self._rows: Ints = np.empty(0, dtype=np.int64)  # usual rows per lane and step
        self._votes: Ints = np.empty(0, dtype=np.int64)  # how certain each of these is

    def seconds(self, timing: StepTiming) -> list[Floats]:
        """Return the seconds of each lane of each family; NaN for lanes not seen in this step."""
        collectives, whole = timing.collectives, _of_whole_groups(timing)
        keys = np.concatenate([_pair_keys(timing.transfers), _group_keys(collectives)[whole]])
        taken = np.concatenate(
            [timing.transfers.transfer_seconds, collectives.transfer_seconds[whole]]
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
        self._count(rows)
        sums = np.bincount(place, taken, count)
        # Lost spans are assumed to be as long as the others of their lane.
        mean = np.divide(sums, rows, out=np.full(count, np.nan), where=rows > 0)
        ends = np.cumsum([len(family.lanes) for family in self.families])
        return np.split(mean * np.maximum(rows, self._rows), ends[:-1]) if self.families else []

    def _count(self, rows: Ints) -> None:
        """Learn the usual number of rows: most steps have it.

        Some have more, such as every hundredth one, in which a script also averages its loss.
        """
        seen = rows > 0
        self._votes += np.where(rows == self._rows, 1, -1) * seen
        is_other = self._votes < 0
        self._rows = np.where(is_other, rows, self._rows)
        self._votes = np.where(is_other, 0, np.minimum(self._votes, MOST_VOTES))

    def _learn(self, keys: Ints, timing: StepTiming) -> None:
        self._forming.learn(keys, timing)
        finished = self._forming.finish()
        if finished is None:
            return
        if finished.size:
            self._add(self._forming, finished)
        self._forming, self._formed = Family(), self._formed + 1

    def _add(self, family: Family, keys: Ints) -> None:
        first = self._rows.size
        together = np.concatenate([self._keys, keys])
        places = np.concatenate([self._places, np.arange(first, first + keys.size)])
        order = np.argsort(together)
        self._keys, self._places = together[order], places[order]
        none = np.zeros(keys.size, dtype=np.int64)
        self._rows = np.concatenate([self._rows, none])
        self._votes = np.concatenate([self._votes, none])
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


def _of_whole_groups(timing: StepTiming) -> npt.NDArray[np.bool_]:
    """Return the collectives of which all members take part in the steps.

    Another member, such as a rank that only generates samples, may have arrived last: then a wait
    for it is no transfer.
    """
    collectives, groups = timing.collectives, timing.groups
    keys, place = np.unique(collectives.group, return_inverse=True)
    fewest = np.full(keys.size, np.iinfo(np.int64).max)
    np.minimum.at(fewest, place, collectives.participants)
    torn = [
        key
        for key, count in zip(keys.tolist(), fewest.tolist(), strict=True)
        if count < len(groups.get(key, ())) and not np.isin(groups[key], timing.ranks.rank).all()
    ]
    return ~np.isin(collectives.group, torn)


def _group_keys(collectives: CollectiveTimes) -> Ints:
    """Return the keys of groups: below zero, unlike those of pairs."""
    keys: Ints = -(collectives.group * _OPS + collectives.op) - 1
    return keys
