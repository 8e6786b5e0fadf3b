"""Levels of many similar series (ranks, links), each relative to the others in the same step.

What all series share (a slow host, a busy network) is subtracted; the rest is watched for rises.
A rise that was reported is *explained*: it is subtracted from the levels from its onset on, until
it is over. So each series keeps its own past, a second problem is found beside the first, and
where there are few series, a series with a problem does not change the levels of the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline_server.detect.statistics.change_point import (
    AGREEING,
    KEPT,
    MEDIAN_VARIANCE,
    NEWEST,
    PAST,
    STEPS_BETWEEN_RENEWALS,
    Shift,
    ShiftMonitor,
)
from paceline_server.medians import column_medians, known_median, median
from paceline_server.steps.peers import medians_of_others

Floats = npt.NDArray[np.float64]

USUAL_STEPS = 64
FOLLOWED_STEPS = 5  # newest steps from which the progress of a rise is judged ...
CORRECTED_STEPS = 64  # ... or up to these if they scatter; its size is corrected from these
FALL_ERRORS = 4.0  # standard errors from which a fall is not due to chance ...
LEFT_ERRORS = 2.0  # ... and from which a part of the rise is left
LEAST_CONTRADICTING_STEPS = 16  # since the onset of a rise that the levels do not show
FIRST_STEPS = 32  # first steps of the generation: the reference for slow change
BLOCKS_STEPS = (8, 32)  # whose sums or means show slowness in some steps only
# A series rose together with another one if it shows this share of the rise, with this score.
JOINING_SHARE = 0.5
JOINING_SCORE = 2.5
LEAST_OTHERS = 2  # fewer have no typical level

POSSIBLE = 0.5  # share of the needed score from which a rise is possible

Course = Literal["lasts", "milder", "over"]


@dataclass(slots=True)
class Rise:
    """A rise of the levels of some series that was found and is not over."""

    series: tuple[int, ...]
    size: float
    before: float  # level before the rise
    since: int  # number of steps pushed before it began ...
    sized_since: int  # ... and before it had its present size
    creeps: bool = False  # it still grows, so that its size is that of the newest steps


class PeerLevels:
    """Levels of many series: push those of each step, read `rises`, and `follow` the reported ones.

    The arguments are those of `ShiftMonitor`.
    """

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
        self._is_spiky = is_spiky
        self._levels: deque[Floats] = deque(maxlen=KEPT)
        self._explained: deque[Floats] = deque(
            maxlen=KEPT
        )  # part of the levels that is explained by reported rises
        self._usual = np.zeros(series)
        self._first = np.full(series, np.nan)  # levels of the first steps
        self.pushed = 0

    def push(self, levels: Floats) -> None:
        """Add one step; NaN where a level is unknown."""
        explained = self._explained[-1].copy() if self._explained else np.zeros(levels.size)
        self._levels.append(levels)
        self._explained.append(explained)
        if not self.pushed % STEPS_BETWEEN_RENEWALS or self.pushed < 2 * STEPS_BETWEEN_RENEWALS:
            self._renew_usual()
        self._monitor.push(self._own(levels - explained))
        self.pushed += 1
        if self.pushed == FIRST_STEPS:
            self._first = column_medians(self._monitor.values)

    @property
    def needed(self) -> float:
        """Return the score, in standard errors, from which a change is not due to chance."""
        return self._monitor.needed

    @property
    def hidden(self) -> float:
        """Return the largest rise that scatter hides; see `ShiftMonitor.hidden`."""
        return self._monitor.hidden

    @property
    def explained(self) -> Floats:
        """Return the sum of the reported rises of each series; 0 where there are none."""
        return np.maximum(self._explained[-1], 0.0)

    def was_explained(self, series: int, steps: int) -> bool:
        """Return whether a rise of the series was reported for any of the newest steps."""
        return any(known[series] > 0.0 for known in list(self._explained)[-steps:])

    def recent(self, series: Sequence[int], steps: int) -> Floats:
        """Return the levels of the series in the newest steps, without the reported rises."""
        columns = list(series)
        newest = zip(list(self._levels)[-steps:], list(self._explained)[-steps:], strict=True)
        return np.array([level[columns] - known[columns] for level, known in newest])

    def unexplained_rows(self, rows: Sequence[Floats]) -> Floats:
        """Return rows of another measure of the same series, without the reported rises."""
        return np.array(rows) - np.maximum(list(self._explained)[-len(rows) :], 0.0)

    def rises(self) -> list[Shift]:
        """Return new rises, the most certain first; see `ShiftMonitor.rises`.

        If rises of most series are explained, as after a moment in which one after the other waited
        for a CPU, corrected levels are no reference: the levels themselves must show a rise.

        Among few series, if one falls, all others seem to rise. This is a recovery, and the new
        level becomes its usual one, once it has lasted: if the series is soon as before again, as
        on a busy host, that is no rise either.
        """
        found = [shift for shift in self._most_certain_first() if not self._ends_fall(shift)]
        fallen = [(shift.steps, self._fallen_instead(shift)) for shift in found]
        steps, falls = next((fall for fall in fallen if fall[1]), (0, {}))
        if not falls:
            return found
        for series, fall in falls.items():
            if not self.explained[series]:  # `follow` finds the end of a reported rise
                self._explain((series,), steps, fall)
        return [shift for shift in self._most_certain_first() if not self._fallen_instead(shift)]

    def possible_rises(self) -> list[Shift]:
        """Return rises that chance may explain, the most certain first; other evidence decides."""
        return self._most_certain_first(POSSIBLE)

    def _most_certain_first(self, certainty: float = 1.0) -> list[Shift]:
        shown = (
            shift
            for shift in self._monitor.rises(certainty)
            if self._shows((shift.series,), shift.steps, shift.steps, shift.size)
        )
        return sorted(shown, key=lambda shift: -shift.score)

    def _shows(self, series: tuple[int, ...], since: int, steps: int, size: float) -> bool:
        """Return whether the series rose beside at least one other; also if most of the others have
        no reported rise, so that they are a reference.

        Args:
            since: number of newest steps since its onset.
            steps: newest steps in which it must show.
        """
        explained = self.explained > 0.0
        explained[list(series)] = True
        if self._is_spiky or 2 * int(explained.sum()) <= explained.size:
            return True
        before = list(self._levels)[-since - PAST : -since]
        if not before:
            return True
        changed = column_medians(np.array(list(self._levels)[-steps:])) - column_medians(
            np.array(before)
        )
        others = np.delete(changed, list(series))
        others = others[~np.isnan(others)]
        own = known_median(changed[list(series)])
        return not others.size or not own - others.min() < size / 2.0

    def _ends_fall(self, shift: Shift) -> bool:
        """Return whether a series only rose to where it was before it fell; the fall is over then.

        A rise to more than that is found when the rest of it is analyzed again.
        """
        fall = np.minimum([known[shift.series] for known in self._explained], 0.0)
        fallen = float(fall[0] - fall[-1])
        if fallen <= 0.0 or 2.0 * fallen < shift.size:
            return False
        self._explain((shift.series,), shift.steps, min(fallen, shift.size))
        return True

    def _fallen_instead(self, shift: Shift) -> dict[int, float]:
        """Return the series that fell when this one seemed to rise, with their change (below 0).

        If most other series fell, they share a change that did not affect this one.
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
        """Return the change of each series' level from the steps before to the newest steps."""
        rows = self.recent(series, steps + PAST)
        return column_medians(rows[-steps:]) - column_medians(rows[:-steps])

    def moved(self, steps_ago: int = 0) -> tuple[Floats, Floats]:
        """Return each series' change since the first steps, absolute and in standard errors.

        NaN where it is unknown; without the reported rises.
        """
        values = self._monitor.values
        newest = values[max(len(values) - steps_ago - FOLLOWED_STEPS, 0) : len(values) - steps_ago]
        moved = column_medians(newest) - self._first
        known = 1.0 / FOLLOWED_STEPS + 1.0 / FIRST_STEPS
        white = self._monitor.sigma**2 * (MEDIAN_VARIANCE * known)
        return moved, moved / np.sqrt(white + self._monitor.drift**2)

    def steps_above(self, series: int, size: float) -> int:
        """Return for how many newest steps the series has exceeded its first level by `size`."""
        below = self._monitor.values[:, series] < self._first[series] + size
        # More than half of a few steps in a row: a single step below is noise.
        block = np.convolve(below, np.ones(FOLLOWED_STEPS), "valid") > FOLLOWED_STEPS / 2.0
        places = np.flatnonzero(block)
        return len(below) - (int(places[-1]) + FOLLOWED_STEPS // 2 if places.size else 0)

    def share_above(self, series: int, steps: int, size: float) -> float:
        """Return in which share of the newest steps the series exceeded its usual level by
        `size`."""
        newest = self._monitor.values[-steps:, series]
        newest = newest[~np.isnan(newest)]
        above = newest >= self._monitor.center[series] + size
        return float(above.mean()) if newest.size else 0.0

    def steps_since_jump(self, series: int, size: float) -> int | None:
        """Return for how many newest steps the series has been at its new level, `size` above the
        first one; None if it rose steadily instead.
        """
        return steps_since_jump(self._monitor.values[:, series] - self._first[series], size)

    def accidents(self, shift: Shift) -> float:
        """Return how many such rises per step are expected from spikes that coincide by chance.

        Spikes of at least half the size are assumed as frequent as in the past of all series.
        """
        values, half = self._monitor.values, shift.before + shift.size / 2.0
        changed = values[-shift.steps :, shift.series]
        times = int((changed >= half).sum())
        past = values[: -shift.steps] - self._monitor.center
        spikes = int((past >= half - self._monitor.center[shift.series]).sum())
        share = (spikes + 1) / max(int((~np.isnan(past)).sum()), 1)
        return float(values.shape[1] * math.comb(shift.steps, times) * share**times)

    def joined(self, series: Sequence[int], shift: Shift) -> list[int]:
        """Return those of `series` that rose together with a shift."""
        if not series:
            return []
        sizes, scores = self._monitor.shift_at(series, shift.steps)
        joins = (sizes >= JOINING_SHARE * shift.size) & (scores >= JOINING_SCORE)
        return [member for member, does in zip(series, joins.tolist(), strict=True) if does]

    def exceeds(self, shift: Shift, others: Sequence[int]) -> bool:
        """Return whether most steps of a shift exceed those of `others` too, of which some may have
        joined it; without two that have not, nothing speaks against it.

        What several series share in single steps, such as longer batches, is not this one's.
        """
        joined = self.joined(others, shift)
        columns = [one for one in others if one not in joined and one != shift.series]
        if len(columns) < LEAST_OTHERS:
            return True
        values = self._monitor.values[-shift.steps - PAST :]
        apart = values[:, shift.series] - column_medians(values[:, columns].T)
        before, newest = apart[: -shift.steps], apart[-shift.steps :]
        before, newest = before[~np.isnan(before)], newest[~np.isnan(newest)]
        if not before.size or not newest.size:
            return True
        agreeing = newest >= median(before) + shift.size / 2.0
        return float(agreeing.mean()) >= AGREEING

    def begin(self, series: tuple[int, ...], steps: int) -> Rise:
        """Explain a rise of the series in the newest `steps`; return it."""
        known = len(self._levels)
        if steps < known and 2 * steps >= min(known, USUAL_STEPS):
            # It has become a part of the usual levels, which would make it smaller.
            self._renew_usual(without=steps)
            self._monitor.replace(self._newest_own(known))
        sizes, _ = self._monitor.shift_at(series, steps)
        return self.assume(series, steps, known_median(sizes))

    def assume(self, series: tuple[int, ...], steps: int, size: float) -> Rise:
        """Explain a rise of a known size."""
        self._explain(series, steps, size)
        before = known_median(self._monitor.center[list(series)])
        since = self.pushed - steps
        return Rise(series, size, before, since, since)

    def assume_creep(self, series: tuple[int, ...], size: float) -> Rise:
        """Explain a rise of a known size since the first steps, which still grows."""
        self._explain(series, FOLLOWED_STEPS, size)
        before = known_median(self._first[list(series)])
        since = self.pushed - FOLLOWED_STEPS
        return Rise(series, size, before, since, since, creeps=True)

    def assume_since_first(self, series: tuple[int, ...], size: float, judged: int) -> Rise:
        """Explain a rise of a known size since the first steps.

        It is a creep, unless the series `judged` shows that noise hid a change from one step to the
        next.
        """
        jumped = self.steps_since_jump(judged, size)
        if jumped is None:
            return self.assume_creep(series, size)
        return self.assume(series, jumped, size)

    def worsen(self, rise: Rise, steps: int) -> None:
        """Add the growth of a rise in the newest `steps` to its explained size."""
        sizes, _ = self._monitor.shift_at(rise.series, steps)
        self._resize(rise, steps, known_median(sizes))

    def follow(self, rise: Rise) -> Course:
        """Return the progress of a rise, and reduce its explained size if it is smaller or over."""
        if self._is_contradicted(rise):
            self._explain(rise.series, self.pushed - rise.since, -rise.size)
            return "over"
        fallen = self._fallen(rise)
        if fallen is None:
            return "lasts"
        steps, left, error = fallen
        # More than half of these steps have fallen.
        if left >= max(self._monitor.smallest, LEFT_ERRORS * error):
            self._resize(rise, steps // 2 + 1, left - rise.size)
            return "milder"
        self._explain(rise.series, steps // 2 + 1, -rise.size)
        return "over"

    def _is_contradicted(self, rise: Rise) -> bool:
        """Return whether a rise is far larger than what the levels of all series differ by.

        Two series are compared with each other only: if rises of both are explained, because noise
        hid the end of one, the correction of each would enlarge the other without limit.
        """
        since = self.pushed - rise.since
        steps = CORRECTED_STEPS if rise.creeps else min(since, CORRECTED_STEPS)
        if steps < LEAST_CONTRADICTING_STEPS:
            return False
        if not rise.creeps and not self._shows(rise.series, since, steps, rise.size):
            return True
        if rise.size <= 1.0:
            return False
        levels = column_medians(np.array(list(self._levels)[-steps:]))
        known = levels[~np.isnan(levels)]
        return known.size > 1 and rise.size > 2.0 * float(np.ptp(known)) + 1.0

    def _fallen(self, rise: Rise) -> tuple[int, float, float] | None:
        """Return a fall to less than half of the rise: the least number of newest steps that show
        it, the size that is left, and the standard error of that.

        None without a fall, or if chance explains it.
        """
        lasted = self.pushed - rise.since
        if lasted <= NEWEST[0]:
            return None
        most = min(lasted, CORRECTED_STEPS)
        half = max(rise.size, self._monitor.smallest) / 2.0
        for steps in (*(few for few in NEWEST if FOLLOWED_STEPS <= few < most), most):
            left = rise.size + self._beyond(rise, steps)
            if left < half:
                error = self._monitor.error_of_level(rise.series, steps)
                if steps == most or rise.size - left >= FALL_ERRORS * error:
                    return steps, left, error
        return None

    def agrees(self, rise: Rise) -> bool:
        """Return whether most steps since the onset of a rise show it."""
        steps = min(self.pushed - rise.since, CORRECTED_STEPS)
        levels = column_medians(self._monitor.values[-steps:, list(rise.series)].T)
        known = levels[~np.isnan(levels)]
        agreeing = int((known >= rise.before - rise.size / 2.0).sum())
        return bool(known.size) and agreeing >= AGREEING * known.size

    def correct(self, rise: Rise) -> None:
        """Correct the size of a rise from the steps since its onset, of a creep from the newest."""
        if rise.creeps:
            rise.since = rise.sized_since = self.pushed - FOLLOWED_STEPS
        steps = self.pushed - rise.sized_since
        error = self._beyond(rise, min(steps, CORRECTED_STEPS))
        rise.size += error
        self._explain(rise.series, steps, error)

    def _resize(self, rise: Rise, steps: int, change: float) -> None:
        """Change the size of a rise, from the newest `steps` on."""
        self._explain(rise.series, steps, change)
        rise.size += change
        rise.sized_since = self.pushed - steps

    def _beyond(self, rise: Rise, steps: int) -> float:
        """Return how far the newest levels are from the level before plus the reported rise."""
        level = known_median(self._monitor.level(rise.series, steps))
        return 0.0 if math.isnan(level) else level - rise.before

    def _explain(self, series: tuple[int, ...], steps: int, size: float) -> None:
        """Subtract `size` from the newest steps, and analyze them again."""
        if math.isnan(size):
            return
        steps = min(steps, len(self._levels))
        for explained in list(self._explained)[-steps:]:
            explained[list(series)] += size
        self._renew_usual()
        self._monitor.replace(self._newest_own(steps))

    def _newest_own(self, steps: int) -> Floats:
        newest = zip(list(self._levels)[-steps:], list(self._explained)[-steps:], strict=True)
        return np.array([self._own(level - known) for level, known in newest])

    def _renew_usual(self, without: int = 0) -> None:
        """Update how much each series usually differs from the typical one.

        `without`: number of newest steps that do not count.
        """
        end = len(self._levels) - without
        steps = slice(max(end - USUAL_STEPS, 0), end)
        levels = np.array(list(self._levels)[steps]) - np.array(list(self._explained)[steps])
        self._usual = np.nan_to_num(column_medians(levels - column_medians(levels.T)[:, None]))

    def _own(self, levels: Floats) -> Floats:
        """Return levels relative to each series' usual one, without what all series share."""
        moved = levels - self._usual
        common = np.full(levels.size, np.nan)
        known = np.flatnonzero(~np.isnan(moved))
        common[known] = medians_of_others(moved[known]) if known.size > 1 else 0.0
        own: Floats = levels - common
        return own


def are_explained(others: Iterable[tuple[PeerLevels, int]], series: int, steps: int) -> bool:
    """Return whether any of these levels had an explained rise of the series in the newest steps.

    `others`: levels, each with the number of steps that one value stands for.
    """
    return any(levels.was_explained(series, -(-steps // each)) for levels, each in others)


def steps_since_jump(risen: Floats, size: float) -> int | None:
    """Return for how many of the newest values they have been at `size`; None if they rose to it
    steadily instead.

    A jump and a steady rise are fitted, each with its best onset, by the sum of absolute errors:
    steps of a busy host scatter widely.
    """
    risen = risen[~np.isnan(risen)] / size
    step, onset = np.arange(risen.size), np.arange(risen.size)[:, np.newaxis]
    jump = (step >= onset).astype(float)
    ramp = np.clip((step - onset) / np.maximum(risen.size - 1 - onset, 1), 0.0, 1.0)
    of_jump, of_ramp = (np.abs(risen - fit).sum(axis=1) for fit in (jump, ramp))
    if of_jump.min() > of_ramp.min():
        return None
    return int(risen.size - of_jump.argmin())
