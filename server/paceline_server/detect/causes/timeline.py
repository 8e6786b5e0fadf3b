"""One metric around the onset of a finding: its values before and after, and when it changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.detect.telemetry import Floats, MetricSeries, without_dips
from paceline_server.medians import median

MAD_TO_SIGMA = 1.4826  # for a normal distribution
# A spell is over after this many normal values, and this long; fewer may be noise.
_LEAST_NORMAL = 2
_LEAST_NORMAL_NS = 3e9


@dataclass(frozen=True, slots=True)
class MetricTimeline:
    """A metric over time: `values[i]` holds from `starts[i]` to `ends[i]` (ns, server's clock).

    A level is sampled at `ends`. A rate is the growth of a counter per second during that time.
    """

    starts: Floats
    ends: Floats
    values: Floats
    weights: Floats  # duration of each value
    is_rate: bool

    def between(self, first_ns: float, last_ns: float) -> MetricTimeline:
        inside = (self.ends >= first_ns) & (self.ends < last_ns)
        return MetricTimeline(
            self.starts[inside],
            self.ends[inside],
            self.values[inside],
            self.weights[inside],
            self.is_rate,
        )

    def typical(self) -> float | None:
        """Return a level's median over time, or the mean rate: counters often grow in bursts."""
        if not self.values.size:
            return None
        if self.is_rate:
            return float(np.average(self.values, weights=self.weights))
        order = np.argsort(self.values, kind="stable")
        elapsed = np.cumsum(self.weights[order])
        return float(self.values[order[np.searchsorted(elapsed, elapsed[-1] / 2)]])

    def scatter(self) -> float:
        """Return a robust estimate of sigma; 0 for fewer than four values."""
        if self.values.size < 4:
            return 0.0
        return MAD_TO_SIGMA * median(np.abs(self.values - median(self.values)))

    def now(self, onset_ns: float) -> float | None:
        """Return the typical value in the later half of the time since the onset.

        The earlier half is left out because neither the onset nor the sampling is exact. None:
        not measured since the onset; an older value would look healthy.
        """
        if not self.ends.size or self.ends[-1] < onset_ns:
            return None
        return self.between((onset_ns + self.ends[-1]) / 2, np.inf).typical()

    def scaled(self, factor: float) -> MetricTimeline:
        values = self.values * factor
        return MetricTimeline(self.starts, self.ends, values, self.weights, self.is_rate)

    def change(self, halfway: float, *, rises: bool) -> tuple[float, float] | None:
        """Return the (start, end) in which the value crossed `halfway` and mostly stayed beyond.

        This is the point after which deviating values outweigh normal ones the most. If it was
        normal again for a while since then, the newest of its spells counts.
        """
        deviates = self.values > halfway if rises else self.values < halfway
        gains = np.cumsum(np.where(deviates, self.weights, -self.weights)[::-1])[::-1]
        if not deviates.any():
            return None
        first = self._newest_spell(deviates, gains, int(np.argmax(gains)))
        return float(self.starts[first]), float(self.ends[first])

    def _newest_spell(self, deviates: npt.NDArray[np.bool_], gains: Floats, first: int) -> int:
        """Return where the newest spell begins that lasts until the end; `first`: the oldest."""
        normal = 0  # values since the last deviating one
        for place in range(first, deviates.size):
            if not deviates[place]:
                normal += 1
                continue
            lasted_ns = self.starts[place] - self.starts[place - normal]
            if normal >= _LEAST_NORMAL and lasted_ns >= _LEAST_NORMAL_NS and gains[place] > 0:
                first = place
            normal = 0
        return first


def levels(series: MetricSeries) -> MetricTimeline:
    times, values = series.columns()
    starts = np.concatenate((times[:1], times[:-1]))
    following = np.concatenate((times[1:], times[-1:]))
    return MetricTimeline(starts, times, values, (following - starts) / 2 + 1.0, is_rate=False)


def rates(series: MetricSeries) -> MetricTimeline:
    """Return the growth per second of a counter. Growth across a reset counts as 0."""
    times, values = without_dips(*series.columns())
    seconds = np.diff(times) / 1e9
    growth = np.maximum(np.diff(values), 0.0)
    return MetricTimeline(times[:-1], times[1:], growth / seconds, seconds, is_rate=True)
