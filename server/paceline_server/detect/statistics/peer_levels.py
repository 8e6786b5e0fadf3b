"""Levels of many alike (ranks, links), each against what the others show in the same step.

What all show together (a slow host, a busy network) is taken off; what is left is watched for
rises. A rise that was told is *explained*: taken off the levels from its onset on, until it is
over. So each series keeps a past of its own, a second trouble is found beside the first, and
where there are few series, one that is in trouble does not move what the others seem to show.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline_server.detect.statistics.change_point import (
    KEPT,
    NEWEST,
    PAST,
    STEPS_BETWEEN_RENEWALS,
    Shift,
    ShiftMonitor,
    column_medians,
)
from paceline_server.steps.peers import medians_of_others

Floats = npt.NDArray[np.float64]

USUAL_STEPS = 64
FOLLOWED_STEPS = 5  # the newest, by which a rise is judged
CORRECTED_STEPS = 64  # from which its size is told
YOUNG_STEPS = 32  # of the generation, by which slow change is judged
# Series beside one that rose have risen with it when they show this share of it, so surely.
JOINING_SHARE = 0.5
JOINING_SCORE = 2.5

MEDIAN_VARIANCE = math.pi / 2.0  # of a median over that of a mean, in normal noise

Course = Literal["lasts", "milder", "over"]


@dataclass(slots=True)
class Rise:
    """One that was told, of one series or several together."""

    series: tuple[int, ...]
    size: float
    before: float  # the level they had
    since: int  # steps pushed before it began


class PeerLevels:
    def __init__(
        self,
        series: int,
        *,
        smallest: float,
        false_alarms: float,
        resolution: float,
        is_spiky: bool = False,
        newest: Sequence[int] = NEWEST,
    ) -> None:
        self._monitor = ShiftMonitor(
            series,
            smallest=smallest,
            false_alarms=false_alarms,
            resolution=resolution,
            is_spiky=is_spiky,
            newest=newest,
        )
        self._levels: deque[Floats] = deque(maxlen=KEPT)
        self._explained: deque[Floats] = deque(maxlen=KEPT)  # of them, by what was told
        self._usual = np.zeros(series)
        self._young = np.full(series, np.nan)  # levels when the generation was
        self.pushed = 0

    def push(self, levels: Floats) -> None:
        """One step; NaN where a level is not known."""
        explained = self._explained[-1].copy() if self._explained else np.zeros(levels.size)
        self._levels.append(levels)
        self._explained.append(explained)
        if not self.pushed % STEPS_BETWEEN_RENEWALS or self.pushed < 2 * STEPS_BETWEEN_RENEWALS:
            self._renew_usual()
        self._monitor.push(self._own(levels - explained))
        self.pushed += 1
        if self.pushed == YOUNG_STEPS:
            self._young = column_medians(self._monitor.values)

    @property
    def needed(self) -> float:
        """Standard errors that a change must have, so that hardly any is an accident."""
        return self._monitor.needed

    @property
    def explained(self) -> Floats:
        """What is told of each series now: 0 where nothing is."""
        return np.maximum(self._explained[-1], 0.0)

    def recent(self, series: Sequence[int], steps: int) -> Floats:
        """What was pushed for them in the newest steps, without what was told."""
        columns = list(series)
        newest = zip(list(self._levels)[-steps:], list(self._explained)[-steps:], strict=True)
        return np.array([level[columns] - known[columns] for level, known in newest])

    def unexplained_rows(self, rows: Sequence[Floats]) -> Floats:
        """The newest steps of another measure of the same series, without what was told."""
        return np.array(rows) - np.maximum(list(self._explained)[-len(rows) :], 0.0)

    def rises(self) -> list[Shift]:
        """New ones, the surest first; see `ShiftMonitor.rises`.

        Of few series one that falls lifts all others against it. That is its recovery, and from
        then on what is usual for it.
        """
        found = self._surest_first()
        fallen = [(shift.steps, self._fallen_instead(shift)) for shift in found]
        steps, falls = next((one for one in fallen if one[1]), (0, {}))
        if not falls:
            return found
        for series, fall in falls.items():
            if not self.explained[series]:  # of what was told, `follow` sees the end
                self._explain((series,), steps, fall)
        return [shift for shift in self._surest_first() if not self._fallen_instead(shift)]

    def _surest_first(self) -> list[Shift]:
        return sorted(self._monitor.rises(), key=lambda one: -one.score)

    def _fallen_instead(self, shift: Shift) -> dict[int, float]:
        """Series that fell when this one seemed to rise, and by how much (below 0).

        Where most others fell it is what they share, and this one did not follow.
        """
        least = shift.size / 2.0
        if self._changed([shift.series], shift.steps)[0] >= least:
            return {}
        changed = self._changed(range(self._usual.size), shift.steps)
        fallen = np.flatnonzero(changed <= -least).tolist()
        others = int((~np.isnan(changed)).sum()) - 1
        if others > 1 and 2 * len(fallen) > others:
            return {}
        return {series: float(changed[series]) for series in fallen if series != shift.series}

    def _changed(self, series: Sequence[int], steps: int) -> Floats:
        """How far their own levels are, in the newest steps, from those before."""
        rows = self.recent(series, steps + PAST)
        return column_medians(rows[-steps:]) - column_medians(rows[:-steps])

    def moved(self, steps_ago: int = 0) -> tuple[Floats, Floats]:
        """How far each is from where it was when the generation was young, and in standard errors.

        NaN where that is not known; without what was told.
        """
        values = self._monitor.values
        newest = values[max(len(values) - steps_ago - FOLLOWED_STEPS, 0) : len(values) - steps_ago]
        moved = column_medians(newest) - self._young
        known = 1.0 / FOLLOWED_STEPS + 1.0 / YOUNG_STEPS
        white = self._monitor.sigma**2 * (MEDIAN_VARIANCE * known)
        return moved, moved / np.sqrt(white + self._monitor.drift**2)

    def steps_above(self, series: int, size: float) -> int:
        """For how many of the newest steps it has been so far from its young level."""
        below = self._monitor.values[:, series] < self._young[series] + size
        # Half of some steps in a row: one of them is noise.
        block = np.convolve(below, np.ones(FOLLOWED_STEPS), "valid") > FOLLOWED_STEPS / 2.0
        places = np.flatnonzero(block)
        return len(below) - (int(places[-1]) + FOLLOWED_STEPS // 2 if places.size else 0)

    def accidents(self, shift: Shift) -> float:
        """How many such rises are expected per step of single spikes that fall together.

        Spikes are as frequent as in all series before it, and one is half of its size at least.
        """
        values, half = self._monitor.values, shift.before + shift.size / 2.0
        changed = values[-shift.steps :, shift.series]
        times = int((changed >= half).sum())
        past = values[: -shift.steps] - self._monitor.center
        spikes = int((past >= half - self._monitor.center[shift.series]).sum())
        share = (spikes + 1) / max(int((~np.isnan(past)).sum()), 1)
        return float(values.shape[1] * math.comb(shift.steps, times) * share**times)

    def joined(self, series: Sequence[int], shift: Shift) -> list[int]:
        """Those of `series` that rose with it."""
        if not series:
            return []
        sizes, scores = self._monitor.shift_at(series, shift.steps)
        joins = (sizes >= JOINING_SHARE * shift.size) & (scores >= JOINING_SCORE)
        return [one for one, does in zip(series, joins.tolist(), strict=True) if does]

    def begin(self, series: tuple[int, ...], steps: int) -> Rise:
        """They rose in the newest `steps`: from now on that is told."""
        sizes, _ = self._monitor.shift_at(series, steps)
        return self.assume(series, steps, _middle(sizes))

    def assume(self, series: tuple[int, ...], steps: int, size: float) -> Rise:
        """The same with a size from elsewhere."""
        self._explain(series, steps, size)
        before = _middle(self._monitor.center[list(series)])
        return Rise(series, size, before, self.pushed - steps)

    def worsen(self, rise: Rise, steps: int) -> None:
        """It rose further in the newest `steps`."""
        sizes, _ = self._monitor.shift_at(rise.series, steps)
        self._explain(rise.series, steps, _middle(sizes))
        rise.size += _middle(sizes)

    def follow(self, rise: Rise) -> Course:
        """What became of it; one that is over is told no longer, and one that is milder smaller."""
        steps = self.pushed - rise.since
        left = rise.size + self._beyond(rise, min(steps, FOLLOWED_STEPS))
        if steps <= NEWEST[0] or left >= rise.size / 2.0:
            return "lasts"
        if left >= self._monitor.smallest:
            self._explain(rise.series, NEWEST[0], left - rise.size)
            rise.size = left
            return "milder"
        self._explain(rise.series, FOLLOWED_STEPS // 2 + 1, -rise.size)
        return "over"

    def correct(self, rise: Rise) -> None:
        """With more steps its size is known better."""
        steps = self.pushed - rise.since
        error = self._beyond(rise, min(steps, CORRECTED_STEPS))
        rise.size += error
        self._explain(rise.series, steps, error)

    def grow(self, rise: Rise) -> None:
        """It changes all the time: its size is what the newest steps show."""
        rise.since = self.pushed - FOLLOWED_STEPS
        self.correct(rise)

    def _beyond(self, rise: Rise, steps: int) -> float:
        """How far the newest levels are from what was before and what is told."""
        level = _middle(self._monitor.level(rise.series, steps))
        return 0.0 if math.isnan(level) else level - rise.before

    def _explain(self, series: tuple[int, ...], steps: int, size: float) -> None:
        """Take it off the newest steps, and look at all series of these steps anew."""
        if math.isnan(size):
            return
        steps = min(steps, len(self._levels))
        for explained in list(self._explained)[-steps:]:
            explained[list(series)] += size
        self._renew_usual()
        newest = zip(list(self._levels)[-steps:], list(self._explained)[-steps:], strict=True)
        self._monitor.replace(np.array([self._own(level - known) for level, known in newest]))

    def _renew_usual(self) -> None:
        """By how much each differs from the typical one, most of the time."""
        levels = np.array(list(self._levels)[-USUAL_STEPS:])
        levels = levels - np.array(list(self._explained)[-USUAL_STEPS:])
        self._usual = np.nan_to_num(column_medians(levels - column_medians(levels.T)[:, None]))

    def _own(self, levels: Floats) -> Floats:
        """Without what the others show as well, each against its usual level."""
        moved = levels - self._usual
        common = np.full(levels.size, np.nan)
        known = np.flatnonzero(~np.isnan(moved))
        common[known] = medians_of_others(moved[known]) if known.size > 1 else 0.0
        own: Floats = levels - common
        return own


def _middle(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan
