"""The replay: end times of all operations, computed from their durations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_server.whatif.model import Model, ReplayBlock

Seconds = npt.NDArray[np.float64]


def replay(model: Model, times: Seconds) -> Seconds:
    """Replace durations with end times, in place, and return them.

    Args:
        times: durations in seconds, [position, lane, dp rank]. Lanes are independent of each other:
            they are steps, counterfactuals, or both. Within a lane, synchronized operations wait
            for the slowest dp rank.
    """
    for block in model.blocks:
        if not block.waits:
            continue  # starts at 0, with the step
        starts = _starts(block, times)
        times[block.first : block.stop] += (
            starts if block.members is None else starts[block.members]
        )
    return times


def starts(model: Model, ends: Seconds) -> Seconds:
    """Return when each operation started: as soon as all operations of its group could."""
    result = np.zeros_like(ends)
    for block in model.blocks:
        if block.waits:
            node_starts = _starts(block, ends)
            result[block.first : block.stop] = (
                node_starts if block.members is None else node_starts[block.members]
            )
    return result


def step_seconds(model: Model, ends: Seconds) -> Seconds:
    """Return the step time, which is the latest end. [lane]"""
    latest: Seconds = ends[model.last].max(axis=(0, 2))
    return latest


def _starts(block: ReplayBlock, ends: Seconds) -> npt.NDArray[Any]:
    """Return start times. [node, lane, dp rank]; one dp rank if all of them start together."""
    latest = ends.take(block.waits[0], axis=0)
    for waits in block.waits[1:]:
        part = latest[: len(waits)]
        np.maximum(part, ends.take(waits, axis=0), out=part)
    return latest.max(axis=2, keepdims=True) if block.synchronized else latest
