"""The replay: when each operation ends, given how long each takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_server.whatif.model import Model, ReplayBlock

Seconds = npt.NDArray[np.float64]


def replay(model: Model, times: Seconds) -> Seconds:
    """Turn durations into ends, in place.

    Args:
        times: [place, lane, dp rank]. Lanes know nothing of each other: steps, counterfactuals, or
            both. Within a lane, synchronized operations wait for the slowest dp rank.
    """
    for block in model.blocks:
        if not block.waits:
            continue  # starts with the step, at 0
        starts = _starts(block, times)
        times[block.first : block.stop] += (
            starts if block.members is None else starts[block.members]
        )
    return times


def starts(model: Model, ends: Seconds) -> Seconds:
    """When each operation of a replay began: when the last of its partners might."""
    found = np.zeros_like(ends)
    for block in model.blocks:
        if block.waits:
            began = _starts(block, ends)
            found[block.first : block.stop] = (
                began if block.members is None else began[block.members]
            )
    return found


def step_seconds(model: Model, ends: Seconds) -> Seconds:
    """[lane]: the latest end."""
    latest: Seconds = ends[model.last].max(axis=(0, 2))
    return latest


def _starts(block: ReplayBlock, ends: Seconds) -> npt.NDArray[Any]:
    """[node, lane, dp rank], the last axis being 1 where all dp ranks start together."""
    latest = ends.take(block.waits[0], axis=0)
    for waits in block.waits[1:]:
        part = latest[: len(waits)]
        np.maximum(part, ends.take(waits, axis=0), out=part)
    return latest.max(axis=2, keepdims=True) if block.synchronized else latest
