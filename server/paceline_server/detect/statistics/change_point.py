"""Change points: lasting rises in many noisy series at once, with one value each per step.

In each step, for each number n of newest values, the mean of the n newest is compared with the mean
of those before (a generalized likelihood ratio test for a shift of unknown time and size). The
noise is estimated from the job itself: white noise from differences of neighboring steps, plus the
scatter of means over four and sixteen steps beyond that, so that slow drifts and a busy host raise
the threshold. The threshold also rises with the number of series, because the largest of many
series scatters more than a single one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline_server.medians import column_medians, known_median, median, quantile

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

KEPT = 160  # number of stored steps
PAST = 64  # most steps before a change that it is compared with
LEAST_PAST = 6  # least steps before a change: a mean of fewer is too uncertain
# How many of the newest values may have changed. Fewer than four steps may be a short stall; a
# change that takes more than 64 steps is drift.
NEWEST = (4, 5, 6, 7, 8, 10, 12, 16, 20, 26, 32, 48, 64)
# For values that lie some steps apart: three are not a short stall, and fewer have no robust
# median.
NEWEST_APART = (3, *NEWEST)
STEPS_BETWEEN_RENEWALS = 8
CLIP_SIGMAS = 4.0  # values further out are clipped
MAD_TO_SIGMA = 1.4826
MEDIAN_VARIANCE = math.pi / 2.0  # variance of a median relative to a mean, for normal noise
# A quantile of normal noise in sigmas: high enough to include bursts, low enough that one shift in
# one of a few series does not count as noise.
TAIL = 0.9
TAIL_SIGMAS = NormalDist().inv_cdf((1 + TAIL) / 2)
# This divided by the number of differences that the scatter was estimated from raises the
# threshold: Student's t needs about 7 at five sigmas, and a median is 0.37 times as efficient as a
# mean.
DOUBT = 20.0
SHARPNESS = 0.6  # a drift has a smaller share of its size in the steps around its middle
AGREEING = 0.7  # share of the changed values that must lie beyond half of the shift


@dataclass(frozen=True, slots=True)
class Shift:
    """A series whose level rose."""

    series: int
    steps: int  # number of newest steps that belong to the new level
    size: float  # new level minus old
    before: float  # the old level
    score: float  # in standard errors


@dataclass(frozen=True, slots=True)
class _Splits:
    """The rise of each series at each split. [split, series]"""

    steps: Ints  # number of newest values, by split
    rise: Floats  # -inf: too small, or too few values
    variance: Floats  # variance of the rise, for white noise

    def surest(self, drift: float) -> tuple[Floats, Ints]:
        """Return each series' highest score over all splits, and its number of newest values."""
        score = self.rise / np.sqrt(self.variance + drift**2)
        best = score.argmax(axis=0)
        return score[best, np.arange(best.size)], self.steps[best]


class ShiftMonitor:
    """Monitors series for shifts: `push` one value per series and step (NaN: unknown), then read
    `rises`.

    Args:
        smallest: the smallest shift to return. Values are logarithms of ratios: 0.1 is about 10%.
        false_alarms: expected per step of healthy, normal noise, over all series together.
        resolution: a lower limit of the scatter.
        is_spiky: single outliers are normal and do not indicate bursts; the caller judges how many
            of them are a shift.
        newest: the numbers of newest values that may have changed, ascending.
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
        self.smallest = smallest
        self._is_spiky = is_spiky
        self._resolution = resolution
        self._newest = np.array(newest)
        self._least = newest[0]
        self.needed = -NormalDist().inv_cdf(false_alarms / max(series, 1) / len(newest))
        self._rows = np.full((2 * KEPT, series), np.nan)
        # Cumulative sums of the clipped offsets from the centers and of the known values, by row.
        self._sums = np.zeros((2 * KEPT + 1, series))
        self._counts = np.zeros((2 * KEPT + 1, series))
        self._end = 0  # rows in use
        self._pushed = 0
        self._center = np.full(series, np.nan)
        self._sigma = np.full(series, resolution)
        # how much higher the threshold is while the scatter itself is uncertain
        self._doubt = math.inf
        self._drift = 0.0

    @property
    def values(self) -> Floats:
        """Return the stored steps, newest last."""
        return self._rows[max(self._end - KEPT, 0) : self._end]

    @property
    def center(self) -> Floats:
        """Return the usual level of each series; NaN before any value is known."""
        return self._center

    @property
    def sigma(self) -> Floats:
        """Return the scatter of each series from step to step."""
        return self._sigma

    @property
    def drift(self) -> float:
        """Return the additional scatter of means, which averaging does not remove."""
        return self._drift

    @property
    def hidden(self) -> float:
        """Return the largest rise that scatter hides however long it lasts.

        Infinite while too few values are known.
        """
        half = min(len(self.values) // 2, PAST)
        if half < LEAST_PAST:
            return math.inf
        sigma = median(self._sigma)
        return self.needed * math.sqrt(2.0 * sigma**2 / half + self._drift**2)

    def push(self, values: Floats) -> None:
        if self._end == len(self._rows):
            self._rows[:KEPT] = self._rows[KEPT:]
            self._sums[: KEPT + 1] = self._sums[KEPT:]
            self._counts[: KEPT + 1] = self._counts[KEPT:]
            self._end = KEPT
        self._rows[self._end] = values
        self._end += 1
        self._pushed += 1
        if self._pushed <= 2 * STEPS_BETWEEN_RENEWALS or not self._pushed % STEPS_BETWEEN_RENEWALS:
            self._renew()
        else:
            self._add_up(self._end - 1)

    def replace(self, newest: Floats) -> None:
        """Replace the newest steps and analyze them again."""
        newest = newest[-min(self._end, KEPT) :]
        self._rows[self._end - len(newest) : self._end] = newest
        self._renew()

    def level(self, series: Sequence[int], steps: int) -> Floats:
        """Return the median of each series over the newest steps; NaN where none is known."""
        return column_medians(self.values[-steps:, list(series)])

    def rises(self, certainty: float = 1.0) -> list[Shift]:
        """Return the series whose level has certainly risen, with the most certain split of
        each.

        With a lower `certainty`, those whose score is this share of the one that is needed.
        """
        values = self.values
        if len(values) < LEAST_PAST + self._least:
            return []
        splits = self._splits(values)
        score, steps = splits.surest(self._drift)
        if self._drift and not self._is_sure(score, certainty).any():
            # A step change that was not found immediately must not count as drift: only the scatter
            # of means that is left without it does.
            unhindered, places = splits.surest(0.0)
            surest = int(unhindered.argmax())
            if self._is_sure(unhindered, certainty)[surest]:
                flat = self._without_step(values, surest, int(places[surest]))
                score, steps = splits.surest(self._scatter_of_means(flat))
        suspects = np.flatnonzero(self._is_sure(score, certainty))
        found = []
        for series in suspects.tolist():
            shift = self._confirmed(series, int(steps[series]), float(score[series]))
            if shift is not None:
                found.append(shift)
        return found

    def shift_at(self, series: Sequence[int], steps: int) -> tuple[Floats, Floats]:
        """Return size and score of each series' rise, given that its newest `steps` changed."""
        columns = list(series)
        values = self.values[:, columns]
        after = column_medians(values[-steps:])
        before = column_medians(values[max(len(values) - steps - PAST, 0) : -steps])
        counts = np.maximum((~np.isnan(values[-steps:])).sum(axis=0), 1)
        error = np.sqrt(self._sigma[columns] ** 2 / counts + self._drift**2)
        return after - before, (after - before) / error

    def error_of_level(self, series: Sequence[int], steps: int) -> float:
        """Return the standard error of `level`, from the scatter before these steps."""
        sigma = median(self._sigma[list(series)])
        return math.sqrt(
            sigma**2 * MEDIAN_VARIANCE / steps + self._scatter_of_means(self.values[:-steps]) ** 2
        )

    def _is_sure(self, score: Floats, certainty: float) -> Bools:
        sure: Bools = score >= certainty * self.needed * self._doubt
        return sure

    def _splits(self, values: Floats) -> _Splits:
        """Return how much each series rose at each split of its values."""
        sums, counts, total = self._sums, self._counts, self._end
        start = total - len(values)
        steps = self._newest[total - self._newest - start >= LEAST_PAST]
        split = total - steps
        first = np.maximum(split - PAST, start)
        after, before = counts[total] - counts[split], counts[split] - counts[first]
        least = np.maximum(self._least, AGREEING * steps)[:, None]
        enough = (after >= least) & (before >= LEAST_PAST)
        after, before = np.maximum(after, 1), np.maximum(before, 1)
        rise = (sums[total] - sums[split]) / after - (sums[split] - sums[first]) / before
        enough &= rise >= 0.9 * self.smallest
        variance = self._sigma**2 * (1.0 / after + 1.0 / before)
        return _Splits(steps, np.where(enough, rise, -np.inf), variance)

    def _confirmed(self, series: int, steps: int, score: float) -> Shift | None:
        """Return the change with its exact step; None if it did not last."""
        column = self.values[:, series]
        steps = self._place(column, steps, float(self._sigma[series]))
        if steps < self._least:
            return None
        before = known_median(column[max(len(column) - steps - PAST, 0) : -steps])
        changed = column[-steps:]
        size = known_median(changed) - before
        if math.isnan(size) or np.isnan(changed[-2:]).all():
            return None
        half = before + size / 2.0
        changed = changed[~np.isnan(changed)]
        lasting = (changed >= half).mean() >= AGREEING
        still = changed[-1] >= half if steps < 2 * NEWEST[0] else median(changed[-4:]) >= half
        if size < self.smallest or not (lasting and still and _is_sharp(column, steps, size)):
            return None
        return Shift(series, steps, size, before, score)

    def _place(self, column: Floats, steps: int, sigma: float) -> int:
        """Return how many of the newest values belong to the new level; `steps` is an estimate."""
        first = max(len(column) - steps - PAST, 0)
        usual, new = known_median(column[first:-steps]), known_median(column[-steps:])
        # A spike must not attract the split.
        reach = max(CLIP_SIGMAS * sigma, 1.5 * abs(new - usual))
        return _split(np.clip(column[first:], usual - reach, usual + reach))

    def _renew(self) -> None:
        """Update centers and scatter from the past, without the newest steps."""
        values = self.values
        past = values[: max(len(values) - NEWEST[0], 1)]
        self._center = column_medians(past)
        steps = np.abs(np.diff(values, axis=0))
        # A single series has few differences: its own scatter is used only if it is clearly larger.
        pooled = _median_sigma(steps.ravel()) / math.sqrt(2.0)
        # Two series that are compared with each other count as one.
        independent = len(steps) * max(values.shape[1] // 2, 1)
        self._doubt = 1.0 + DOUBT / max(independent, 1)
        own = column_medians(steps) * MAD_TO_SIGMA / math.sqrt(2.0)
        enough = (~np.isnan(steps)).sum(axis=0) >= 24
        noisier = enough & (own > 1.3 * pooled)
        self._sigma = np.maximum(np.where(noisier, own, pooled), self._resolution)
        self._drift = self._scatter_of_means(past)
        self._add_up(self._end - len(values))

    def _add_up(self, first: int) -> None:
        """Update the sums of the rows from `first` on."""
        reach = np.maximum(CLIP_SIGMAS * self._sigma, 2.0 * CLIP_SIGMAS * self._drift)
        reach = np.maximum(reach, 2.0 * self.smallest)
        offset = np.clip(self._rows[first : self._end] - self._center, -reach, reach)
        known = ~np.isnan(offset)
        offset[~known] = 0.0
        for rows, sums in ((offset, self._sums), (known, self._counts)):
            np.cumsum(rows, axis=0, out=sums[first + 1 : self._end + 1])
            sums[first + 1 : self._end + 1] += sums[first]

    def _without_step(self, values: Floats, series: int, steps: int) -> Floats:
        """Return the values as if no level had changed when that of `series` did."""
        steps = max(self._place(values[:, series], steps, float(self._sigma[series])), 1)
        before = column_medians(values[max(len(values) - steps - PAST, 0) : -steps])
        rise = np.nan_to_num(column_medians(values[-steps:]) - before)
        return np.concatenate([values[:-steps], values[-steps:] - rise])

    def _scatter_of_means(self, past: Floats) -> float:
        """Return how much more means of several steps scatter than white noise explains."""
        white = median(self._sigma)
        if self._is_spiky:
            reach = np.maximum(CLIP_SIGMAS * self._sigma, 2.0 * self.smallest)
            past = np.clip(past, self._center - reach, self._center + reach)
        beyond = 0.0
        for length in (4, 16):
            blocks = len(past) // length
            if blocks < 2:
                break
            means = past[len(past) - blocks * length :].reshape(blocks, length, -1).mean(axis=1)
            moved = np.abs(np.diff(means, axis=0)).ravel()
            moved = moved[~np.isnan(moved)]
            if moved.size < 6:
                break
            tail = quantile(moved, TAIL) / TAIL_SIGMAS
            sigma = max(MAD_TO_SIGMA * median(moved), tail) / math.sqrt(2.0)
            beyond = max(beyond, sigma**2 - white**2 / length)
        return math.sqrt(beyond)


def _median_sigma(steps: Floats) -> float:
    known = steps[~np.isnan(steps)]
    return MAD_TO_SIGMA * median(known) if known.size else 0.0


def _is_sharp(column: Floats, steps: int, size: float) -> bool:
    """Return whether it is a step change; a drift hardly moves in the steps around its middle."""
    near = max(2 * NEWEST[0], steps // 4)
    split = len(column) - steps
    before, after = column[max(split - near, 0) : split], column[split : split + near]
    jump = known_median(after) - known_median(before)
    return math.isnan(jump) or jump >= SHARPNESS * size


def _split(values: Floats) -> int:
    """Return how many of the newest values belong to a new level: the likeliest split."""
    known = ~np.isnan(values)
    positions = np.flatnonzero(known)
    kept = values[known]
    if kept.size < 2:
        return 0
    sums = np.cumsum(kept)[:-1]
    left = np.arange(1, kept.size)
    right = kept.size - left
    gain = (sums[-1] + kept[-1] - sums) / right - sums / left
    gain = np.where(gain > 0, gain * gain * left * right / kept.size, 0.0)
    return int(values.size - positions[int(gain.argmax()) + 1])
