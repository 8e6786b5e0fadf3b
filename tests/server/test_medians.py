"""Medians and quantiles are those of numpy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from paceline_server.medians import column_medians, known_median, median, quantile, quantiles

NUMBERS = st.floats(-1e9, 1e9)
SHARES = (0.0, 0.25, 0.5, 0.9, 0.99, 1.0)


@given(arrays(np.float64, array_shapes(max_dims=2, max_side=12), elements=NUMBERS))
def test_they_are_those_of_numpy(values: np.ndarray):
    assert median(values) == pytest.approx(float(np.median(values)))
    assert quantiles(values, SHARES) == pytest.approx(np.quantile(values, SHARES).tolist())


@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS),
    st.integers(0, 80),
)
def test_columns_are_compared_without_what_is_not_known(values: np.ndarray, unknown: int):
    values.ravel()[: min(unknown, values.size)] = np.nan
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        expected = np.nanmedian(values, axis=0)
    assert column_medians(values) == pytest.approx(expected, nan_ok=True)
    column = values[:, 0]
    assert known_median(column) == pytest.approx(float(expected[0]), nan_ok=True)


def test_what_is_unknown_is_not_a_number():
    assert math.isnan(median([]))
    assert math.isnan(median([1.0, math.nan, 2.0]))
    assert math.isnan(known_median(np.array([math.nan])))
    assert np.isnan(column_medians(np.empty((0, 3)))).all()


def test_infinite_values_are_ordered_like_others():
    assert median([math.inf, math.inf]) == math.inf
    assert median([-math.inf, 1.0, math.inf]) == 1.0
    assert quantile([1.0, math.inf], 0.0) == 1.0
