"""Ranks and nodes that become slower gradually, too slowly for any step to show a change.

A rank's level is compared with its level in the first steps of the generation. As rooms warm up,
whole nodes drift by a few percent. So a rank must also have become slower than the other ranks of
its node, or the whole node by much more than drift.
"""

from __future__ import annotations

import math

import numpy as np

from paceline_server.detect.observation import Generation
from paceline_server.detect.statistics.peer_levels import Floats, PeerLevels
from paceline_server.medians import median

# A step change is found within this many steps; a creep had a part of its size before that.
STEP_STEPS = 8
PARTLY = 0.4
# The onset of a creep is extrapolated from the step in which it reached this share of its size.
_ONSET_SHARE = 0.3
LEAST_RANKS = 3  # if two ranks drift apart, either may have changed


def steps_since_onset(levels: PeerLevels, series: int, size: float) -> int | None:
    """Return for how many steps a series has been creeping to `size` above its first level.

    None if it changed from one step to the next, or only for a moment.
    """
    early = levels.steps_above(series, _ONSET_SHARE * size)
    return None if early < STEP_STEPS else round(early / (1.0 - _ONSET_SHARE))


class Creep:
    """Finds ranks, or most ranks of a node, that gradually became slower by at least a given
    slowdown."""

    def __init__(
        self,
        generation: Generation,
        *,
        slowdown: float,
        slowdown_of_node: float,
        most_of_node: float,
    ) -> None:
        self._least = math.log(slowdown)
        self._least_of_node = math.log(slowdown_of_node)
        self._most_of_node = most_of_node
        self._on_node: dict[str | None, list[int]] = {}
        for rank in range(generation.topology.world_size):
            self._on_node.setdefault(generation.node(rank), []).append(rank)
        self._generation = generation

    def found(self, levels: PeerLevels) -> list[tuple[list[int], float]]:
        """Return (ranks, log of their slowdown) for each: one rank, or most ranks of a node."""
        if self._generation.topology.world_size < LEAST_RANKS:
            return []
        moved, score = levels.moved()
        far = np.flatnonzero((moved >= self._least) & (score >= levels.needed))
        if far.size:  # a recent rise is a step change, or temporary
            earlier, _ = levels.moved(STEP_STEPS)
            far = far[earlier[far] >= PARTLY * moved[far]]
        found = []
        done: set[int] = set()
        for rank in far[np.argsort(-moved[far])].tolist():
            ranks = [] if rank in done else self._together(rank, moved)
            done.update(ranks)
            if ranks:
                found.append((ranks, median(moved[ranks])))
        return found

    def _together(self, rank: int, moved: Floats) -> list[int]:
        """Return the ranks that became slower together with `rank`; empty if it may be drift."""
        node = self._on_node[self._generation.node(rank)]
        others = np.array([other for other in node if other != rank], dtype=np.int64)
        others = others[~np.isnan(moved[others])]
        if not others.size or moved[rank] - median(moved[others]) < self._least:
            slow = [member for member in node if moved[member] >= self._least_of_node]
            return slow if rank in slow and len(slow) >= self._most_of_node * len(node) else []
        return [rank]
