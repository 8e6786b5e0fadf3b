"""Going back to a checkpoint before the loss went wrong, and leaving out the data that led there.

The server requests both in the environment of the ranks:

    PACELINE_ROLL_BACK=40:act-1a2b3c4d    load no checkpoint after step 40; once per id
    PACELINE_SKIP_STEPS=40:60             after step 40, leave out the data of 20 steps

Later checkpoints are renamed, not deleted. If there is none at or before the step, nothing changes:
a training never begins at step 0 for it. A repeated request does nothing, so that a job that
crashes after it has gone back does not go back again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoints.errors import CheckpointError
from paceline.checkpoints.layout import saved_checkpoints

_log = logging.getLogger(__name__)

ROLL_BACK = "PACELINE_ROLL_BACK"
SKIP_STEPS = "PACELINE_SKIP_STEPS"
SET_ASIDE = "rolled-back-"  # prefix of checkpoints after the step
_DONE = "roll-back-"  # prefix of the marker of a request that was carried out
_ROLL_BACK = re.compile(r"(\d{1,18}):([\w-]{1,64})")
_SKIP = re.compile(r"(\d{1,18}):(\d{1,18})")


class RollBack(NamedTuple):
    """A request to load no checkpoint after `step`."""

    step: int
    identity: str


class Skip(NamedTuple):
    """Steps whose data is left out once `first` steps are completed."""

    first: int
    last: int  # exclusive

    @property
    def steps(self) -> int:
        return self.last - self.first


def roll_back_of(environment: Mapping[str, str]) -> RollBack | None:
    """Return the request; None without one, or if it is malformed."""
    found = _ROLL_BACK.fullmatch(environment.get(ROLL_BACK, ""))
    return None if found is None else RollBack(int(found[1]), found[2])


def skip_of(environment: Mapping[str, str]) -> Skip | None:
    """Return the data to leave out; None without a request, or if it is malformed."""
    found = _SKIP.fullmatch(environment.get(SKIP_STEPS, ""))
    skip = None if found is None else Skip(int(found[1]), int(found[2]))
    return skip if skip is not None and skip.steps > 0 else None


def go_back(directory: Path, request: RollBack) -> bool:
    """Set the checkpoints after the step aside; return whether this was done now. Rank 0 only.

    Raises OSError.
    """
    marker = directory / f"{_DONE}{request.identity}"
    if marker.exists():
        return False
    saved = saved_checkpoints(directory)
    later = [one for one in saved if one.step > request.step]
    if later and len(later) == len(saved):
        _log.error(
            "Cannot go back: no checkpoint at or before step %d is left; the newest one is used. "
            "Keep more of them.",
            request.step,
        )
        marker.touch()
        return False
    for one in later:
        (directory / one.name).rename(directory / f"{SET_ASIDE}{one.name}")
    marker.touch()
    _log.warning("Went back: %d checkpoints after step %d are set aside.", len(later), request.step)
    return True


class SkippingBatches:
    """The batches of a loader; `skip` leaves some out."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._left = 0
        self.skipped = 0  # since `take_skipped` was last called
        self.is_over = False  # there are no more
        self.is_replaced = False  # by a later loop with the same state

    def skip(self, count: int) -> None:
        """Leave out the next `count` batches."""
        self._left += count

    def take_skipped(self) -> int:
        """Return how many batches were left out since the last call."""
        skipped, self.skipped = self.skipped, 0
        return skipped

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.is_replaced:
            raise CheckpointError(
                "another loop began with the same state inside this one: a Checkpoints has the "
                "position of one loop; leave out `state` in the inner `paceline.steps`"
            )
        try:
            while self._left:
                next(self._batches)
                self._left -= 1
                self.skipped += 1
            return next(self._batches)
        except StopIteration:
            self.is_over = True
            raise
