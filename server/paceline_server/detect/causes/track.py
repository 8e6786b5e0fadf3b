"""One series seen around an onset: what it was before, what it is since, and when it changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_server.detect.telemetry import Floats, MetricSeries, without_dips

MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Track:
    """`values[i]` is known of the time from `starts[i]` to `ends[i]`.

    A level is sampled at `ends`; a rate is a counter's growth per second over that time.
    """

    starts: Floats
    ends: Floats
    values: Floats
    weights: Floats  # for how long each value stands
    is_rate: bool

    def between(self, first_ns: float, last_ns: float) -> Track:
        inside = (self.ends >= first_ns) & (self.ends < last_ns)
        return Track(
            self.starts[inside],
            self.ends[inside],
            self.values[inside],
            self.weights[inside],
            self.is_rate,
        )

    def typical(self) -> float | None:
        """A level's median over time; the mean rate, for counters often grow in bursts."""
        if not self.values.size:
            return None
        if self.is_rate:
            return float(np.average(self.values, weights=self.weights))
        order = np.argsort(self.values, kind="stable")
        passed = np.cumsum(self.weights[order])
        return float(self.values[order[np.searchsorted(passed, passed[-1] / 2)]])

    def scatter(self) -> float:
        """Sigma, robustly; 0 where there is too little to tell."""
        if self.values.size < 4:
            return 0.0
        return MAD_TO_SIGMA * float(np.median(np.abs(self.values - np.median(self.values))))

    def now(self, onset_ns: float) -> float | None:
        """Since the onset: the later half of it, for neither the onset nor the sampling is exact.

        None where nothing was measured since: an older value would say that all is well.
        """
        if not self.ends.size or self.ends[-1] < onset_ns:
            return None
        return self.between((onset_ns + self.ends[-1]) / 2, np.inf).typical()

    def scaled(self, factor: float) -> Track:
        values = self.values * factor
        return Track(self.starts, self.ends, values, self.weights, self.is_rate)

    def change(self, halfway: float, *, rises: bool) -> tuple[float, float] | None:
        """The (start, end) within which the value went beyond `halfway` and, on the whole, stayed.

        That is where the rest of the time holds most more deviating than normal values.
        """
        deviates = self.values > halfway if rises else self.values < halfway
        gains = np.cumsum(np.where(deviates, self.weights, -self.weights)[::-1])[::-1]
        if not deviates.any():
            return None
        first = int(np.argmax(gains))
        return float(self.starts[first]), float(self.ends[first])


def levels(series: MetricSeries) -> Track:
    times, values = series.columns()
    starts = np.concatenate((times[:1], times[:-1]))
    following = np.concatenate((times[1:], times[-1:]))
    return Track(starts, times, values, (following - starts) / 2 + 1.0, is_rate=False)


def rates(series: MetricSeries) -> Track:
    """A counter that was reset grew by nothing that is known."""
    times, values = without_dips(*series.columns())
    seconds = np.diff(times) / 1e9
    grown = np.maximum(np.diff(values), 0.0)
    return Track(times[:-1], times[1:], grown / seconds, seconds, is_rate=True)
