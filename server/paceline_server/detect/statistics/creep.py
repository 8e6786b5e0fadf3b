"""Who became slower little by little, too slowly for any step to show a change.

A rank's level is compared with what it was when the generation was young. Rooms warm up and
whole nodes drift by some percent; so a rank must also have left the others of its node behind,
or the node as a whole have moved by much more than drift.
"""

from __future__ import annotations

import math

import numpy as np

from paceline_server.detect.observation import Generation
from paceline_server.detect.statistics.peer_levels import Floats, PeerLevels

# A step is found within so many steps; of a creep a good part was there before.
STEP_STEPS = 8
PARTLY = 0.4
LEAST_RANKS = 3  # of two that differ more and more, either may have changed


class Creep:
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
        """(ranks, how far they have moved) of each: a rank, or most of a node."""
        if self._generation.topology.world_size < LEAST_RANKS:
            return []
        moved, score = levels.moved()
        far = np.flatnonzero((moved >= self._least) & (score >= levels.needed))
        if far.size:  # what has just risen is a step, or passes
            earlier, _ = levels.moved(STEP_STEPS)
            far = far[earlier[far] >= PARTLY * moved[far]]
        found = []
        done: set[int] = set()
        for rank in far[np.argsort(-moved[far])].tolist():
            ranks = [] if rank in done else self._together(rank, moved)
            done.update(ranks)
            if ranks:
                found.append((ranks, float(np.median(moved[ranks]))))
        return found

    def _together(self, rank: int, moved: Floats) -> list[int]:
        """Those that moved with it; empty: it may be the weather."""
        node = self._on_node[self._generation.node(rank)]
        others = np.array([one for one in node if one != rank], dtype=np.int64)
        others = others[~np.isnan(moved[others])]
        if not others.size or moved[rank] - np.median(moved[others]) < self._least:
            slow = [one for one in node if moved[one] >= self._least_of_node]
            return slow if rank in slow and len(slow) >= self._most_of_node * len(node) else []
        return [rank]
