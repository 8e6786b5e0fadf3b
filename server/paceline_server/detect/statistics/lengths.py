"""The expected cost of a microbatch, given the lengths of its sequences.

The time of a microbatch grows with its tokens (matrix products) and with the squares of its
sequence lengths (attention): seconds = base + per_token * sum(s) + per_squared_token * sum(s^2),
fitted robustly and in relative terms, for each (stage, chunk, op) of a job. Ratios to it make ranks
with different data comparable. Without lengths, the expected cost is one value for all.
Source of the model: "Understanding Stragglers in Large Model Training Using What-if Analysis",
OSDI 2025, section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.medians import median
from paceline_server.steps.grid import grid_of
from paceline_server.steps.timing import ComputeTimes
from paceline_wire.topology import Topology

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HUBER = 1.345  # residuals beyond this many sigmas count less: 95% efficient on normal noise
MAD_TO_SIGMA = 1.4826
FIT_ROUNDS = 8
FIT_SAMPLES = 24  # least samples: three coefficients fitted to fewer would follow the noise
KEPT_SAMPLES = 2048  # per cell: the error of a coefficient is then far below a percent
SPREAD_THAT_COUNTS = 0.01  # spread of tokens or squares; below it, lengths explain nothing
OPS = 4  # FORWARD, BACKWARD, BACKWARD_WEIGHT are 1..3
# fits happen after these steps, and then after every
EARLY_FITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)
STEPS_BETWEEN_FITS = 64
FEW_ROWS = 4096  # rows of a step; with more, only every fourth step is sampled
STEPS_BETWEEN_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class LengthCost:
    """Seconds of one microbatch of one (stage, chunk, op); coefficients are never negative."""

    base: float
    per_token: float = 0.0
    per_squared_token: float = 0.0

    def seconds(self, tokens: Ints, squared_tokens: Ints) -> Floats:
        found: Floats = (
            self.base + self.per_token * tokens + self.per_squared_token * squared_tokens
        )
        return found


def fit_cost(tokens: Ints, squared_tokens: Ints, seconds: Floats) -> LengthCost | None:
    """Return the cost that fits most of the samples; None if there are too few.

    A minority of samples, such as those of a slow rank, hardly changes it. If lengths are not given
    (tokens 0) or hardly differ, it is the median.
    """
    good = np.isfinite(seconds) & (seconds > 0)
    if not good.any():
        return None
    seconds = seconds[good]
    s, q = tokens[good].astype(np.float64), squared_tokens[good].astype(np.float64)
    flat = LengthCost(median(seconds))
    if s.min() <= 0 or max(s.std() / s.mean(), q.std() / max(q.mean(), 1)) < SPREAD_THAT_COUNTS:
        return flat
    if seconds.size < FIT_SAMPLES:
        return None
    scale = np.array([seconds.mean(), seconds.mean() / s.mean(), seconds.mean() / max(q.mean(), 1)])
    columns = np.stack([np.ones_like(s), s, q], axis=1) * scale / seconds[:, None]
    used = [0, 1, 2] if q.min() > 0 else [0, 1]
    while used:
        coefficients = _robustly(columns[:, used])
        if (coefficients >= 0).all():
            found = np.zeros(3)
            found[used] = coefficients
            return LengthCost(*(found * scale).tolist())
        used.pop(int(coefficients.argmin()))
    return flat


def _robustly(columns: Floats) -> Floats:
    """Return coefficients for which the weighted columns sum to 1 as closely as possible.

    Outliers count less.
    """
    weights = np.ones(len(columns))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(FIT_ROUNDS):
        weighted = columns * weights[:, None]
        coefficients = np.linalg.lstsq(weighted.T @ columns, weighted.sum(axis=0), rcond=1e-9)[0]
        residuals = np.abs(columns @ coefficients - 1.0)
        sigma = max(MAD_TO_SIGMA * median(residuals), 1e-6)
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(residuals, 1e-12))
    return coefficients


class ExpectedCompute:
    """The costs of all cells of a job, learned while it runs.

    A new fit changes how the cost depends on lengths, never the level of a cell: a ratio of 1.2
    stays 1.2, so that a fit cannot hide a slowdown.
    """

    def __init__(self, topology: Topology) -> None:
        self._stage = grid_of(topology).stage
        self._chunks = 1  # chunk -1 (unknown) is stored first
        self._stages = topology.pp
        self._costs = np.full((topology.pp * OPS, 3), np.nan)
        self._samples: dict[int, Floats] = {}
        self._steps = 0

    def cells(self, compute: ComputeTimes) -> Ints:
        """Return the (stage, chunk, op) of each row, as a small number."""
        stage = self._stage[compute.rank]
        cell: Ints = ((compute.chunk + 1) * self._stages + stage) * OPS + compute.op
        return cell

    def learn(self, compute: ComputeTimes) -> None:
        """Learn from one step's rows; call it before `ratios` of that step."""
        if not compute.rank.size:
            return
        self._grow(int(compute.chunk.max()) + 2)
        self._steps += 1
        cells = self.cells(compute)
        is_due = self._steps % STEPS_BETWEEN_FITS == 0 or self._steps in EARLY_FITS
        is_worth = compute.rank.size <= FEW_ROWS or self._steps % STEPS_BETWEEN_SAMPLES == 0
        if not (is_due or is_worth or np.isnan(self._costs[cells, 0]).any()):
            return
        order = np.argsort(cells.astype(np.uint16), kind="stable")  # 16-bit keys are radix-sorted
        edges = np.flatnonzero(np.diff(cells[order])) + 1
        for rows in np.split(order, edges):
            cell = int(cells[rows[0]])
            self._add_samples(cell, compute, rows)
            if is_due or np.isnan(self._costs[cell, 0]):
                self._fit(cell)

    def ratios(self, compute: ComputeTimes) -> Floats:
        """Return self seconds over expected seconds; NaN where there is no expectation."""
        coefficients = self._costs[self.cells(compute)]
        expected = coefficients[:, 0] + coefficients[:, 1] * compute.tokens
        expected += coefficients[:, 2] * compute.squared_tokens
        good = (expected > 0) & (compute.self_seconds > 0)
        ratios = np.full(compute.rank.size, np.nan)
        np.divide(compute.self_seconds, expected, out=ratios, where=good)
        return ratios

    def cost(self, stage: int, chunk: int, op: int) -> LengthCost | None:
        """Return the cost of a cell; None if it was never seen. `chunk` -1: unknown."""
        cell = ((chunk + 1) * self._stages + stage) * OPS + op
        if cell >= len(self._costs) or np.isnan(self._costs[cell, 0]):
            return None
        return LengthCost(*self._costs[cell].tolist())

    def _grow(self, chunks: int) -> None:
        if chunks > self._chunks:
            more = np.full(((chunks - self._chunks) * self._stages * OPS, 3), np.nan)
            self._costs = np.vstack([self._costs, more])
            self._chunks = chunks

    def _add_samples(self, cell: int, compute: ComputeTimes, rows: Ints) -> None:
        # Every n-th row is enough for a step with thousands of rows.
        rows = rows[:: max(rows.size // (KEPT_SAMPLES // 8), 1)]
        new = np.stack(
            [compute.tokens[rows], compute.squared_tokens[rows], compute.self_seconds[rows]], axis=1
        )
        known = self._samples.get(cell)
        both = new if known is None else np.concatenate([known, new])
        self._samples[cell] = both[-KEPT_SAMPLES:].astype(np.float64)

    def _fit(self, cell: int) -> None:
        tokens, squared, seconds = self._samples[cell].T
        cost = fit_cost(tokens.astype(np.int64), squared.astype(np.int64), seconds)
        if cost is None:
            return
        new = np.array([cost.base, cost.per_token, cost.per_squared_token])
        old = self._costs[cell]
        if not np.isnan(old[0]):
            features = np.stack([np.ones_like(tokens), tokens, squared])
            new *= median(old @ features) / max(median(new @ features), 1e-12)
        self._costs[cell] = new
