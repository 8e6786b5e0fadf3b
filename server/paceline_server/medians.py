"""Medians and quantiles of the short arrays that one step consists of.

They are those of numpy, which takes ten times as long for some dozens of values.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def median(values: npt.ArrayLike) -> float:
    """Return the median of all values. It is NaN without values, and if any of them is NaN."""
    return quantile(values, 0.5)


def known_median(values: Floats) -> float:
    """Return the median of the numbers among the values. It is NaN if all are NaN."""
    return median(values[~np.isnan(values)])


def quantile(values: npt.ArrayLike, share: float) -> float:
    """Return the value below which this share of all values lies, interpolated linearly.

    It is NaN without values, and if any of them is NaN.
    """
    return quantiles(values, (share,))[0]


def quantiles(values: npt.ArrayLike, shares: Collection[float]) -> list[float]:
    """Return a `quantile` for each share."""
    ordered = np.sort(values, axis=None)  # NaN last
    count = ordered.size
    if not count or math.isnan(ordered[-1]):
        return [math.nan] * len(shares)
    found = []
    for share in shares:
        place = share * (count - 1)
        low = int(place)
        one, other = float(ordered[low]), float(ordered[min(low + 1, count - 1)])
        found.append(one if place == low or one == other else one + (place - low) * (other - one))
    return found


def column_medians(values: Floats) -> Floats:
    """Return the median of the numbers in each column. It is NaN if all are NaN."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # NaN last
    counts = (~np.isnan(values)).sum(axis=0)
    low, high = np.maximum((counts - 1) // 2, 0), counts // 2
    columns = np.arange(values.shape[1])
    medians = (ordered[low, columns] + ordered[np.minimum(high, len(values) - 1), columns]) / 2.0
    return np.where(counts > 0, medians, np.nan)
