"""Fill in missing values. NaN means missing; numpy warnings are avoided."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def medians(values: Floats) -> Floats:
    """Return medians over the last axis, ignoring NaN; NaN if there is no number."""
    ordered = np.sort(values, axis=-1)  # NaN sorts last
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, np.minimum(count // 2, ordered.shape[-1] - 1), axis=-1)
    middle: Floats = ((low + high) / 2)[..., 0]
    return middle


def fill(table: Floats) -> Floats:
    """Fill in missing values of a table [row, step, ...] in place, and return it.

    A missing value is the median of its row in that step, else of its row in all steps, else of
    the whole table; 0 if the table has no value.
    """
    lost = np.flatnonzero(np.isnan(table).any(axis=tuple(range(1, table.ndim))))
    if not lost.size:
        return table
    rows = table[lost].reshape(len(lost), table.shape[1], -1)
    typical = medians(rows)[:, :, None]
    for wider in (medians(rows.reshape(len(lost), -1))[:, None, None], medians(table.ravel())):
        typical = np.where(np.isnan(typical), wider, typical)
    rows = np.where(np.isnan(rows), np.nan_to_num(typical), rows)
    table[lost] = rows.reshape(len(lost), *table.shape[1:])
    return table


def fill_from_own(table: Floats) -> Floats:
    """Fill missing values with the median of the other rows of their column. [row, ...]"""
    lost = np.isnan(table)
    if lost.any():
        typical = medians(np.moveaxis(table, 0, -1))
        table = np.where(lost, typical, table)
    return table
