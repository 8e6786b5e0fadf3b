"""Comparison of a value with its peers, excluding itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline_server.steps.grid import RankGrid

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNEVEN = 0.01  # relative difference of tokens beyond which context-parallel ranks are no peers


def peer_groups(ranks: Ints, grid: RankGrid, rank_of_row: Ints, tokens: Ints) -> Ints:
    """Return a number for the peers of each rank: those who do the same work.

    Peers share a stage. Its tensor and data ranks do the same work by construction. Its context
    ranks do where a sequence is divided evenly, as load-balanced ring attention does: they are
    peers as well, or a job with one replica would have none. If the lengths that the script reports
    differ between them, a rank is compared only with those of its own context rank.

    Args:
        ranks: the ranks.
        grid: of all ranks.
        rank_of_row: rank of each microbatch.
        tokens: of each microbatch; 0: not reported.
    """
    stage, cp_rank = grid.stage[ranks], grid.cp_rank[ranks]
    parts = int(grid.cp_rank.max(initial=0)) + 1
    if parts == 1 or not tokens.any():
        return stage
    of_part = grid.cp_rank[rank_of_row]
    rows = np.bincount(of_part, minlength=parts)
    means = np.bincount(of_part, tokens, parts) / np.maximum(rows, 1)
    known = means[rows > 0]
    if np.ptp(known) <= UNEVEN * known.mean():
        return stage
    return stage * parts + cp_rank


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
