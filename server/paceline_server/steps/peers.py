"""Comparison of a value with its peers, excluding itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def medians_of_others(values: Floats) -> Floats:
    """Return for each value the median of all other values; NaN if there are none.

    One sort is enough, because leaving out one value moves the middle by at most one position.
    """
    count = values.size
    if count < 2:
        return np.full(count, np.nan)
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)

    def others(middle: int) -> Floats:
        picked: Floats = ordered[middle + (place <= middle)]
        return picked

    low, high = (count - 2) // 2, (count - 1) // 2
    return (others(low) + others(high)) / 2.0
