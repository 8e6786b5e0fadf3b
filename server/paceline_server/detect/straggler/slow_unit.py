"""The unit to report when ranks become slow: one rank, a node or a stage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline_server.detect.observation import Generation

MOST = 0.75  # share of a node's (or stage's) ranks that must be slow to name the node (or stage)


@dataclass(frozen=True, slots=True)
class SlowUnit:
    """Slow ranks, ascending; with their `node` and `stage` where all of them share one."""

    ranks: tuple[int, ...]
    fingerprint: str
    node: str | None
    stage: int | None
    whole: str | None = None  # "node" or "stage" if most of its ranks are slow

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if self.whole is None else None

    def subject(self, generation: Generation) -> str:
        """Return the subject of a sentence."""
        if self.whole == "node":
            return f"Node {self.node} ({_listed(self.ranks)})"
        if self.whole == "stage":
            return f"Stage {self.stage} ({_listed(self.ranks)})"
        return generation.subject(self.rank)


class SlowUnits:
    """The nodes and stages of a generation with more than one rank but not all ranks."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        world = generation.topology.world_size
        units: dict[tuple[str, object], list[int]] = {}
        for rank in range(world):
            units.setdefault(("stage", generation.stage(rank)), []).append(rank)
            if (node := generation.node(rank)) is not None:
                units.setdefault(("node", node), []).append(rank)
        self._units = {unit: ranks for unit, ranks in units.items() if 1 < len(ranks) < world}

    def beside(self, rank: int) -> list[int]:
        """Return the ranks of the same node and stage, which may be slow for the same reason."""
        return sorted({member for _, _, ranks in self._units_of(rank) for member in ranks})

    def units(self, rank: int) -> list[list[int]]:
        """Return the ranks of its node and those of its stage, if there are others."""
        return [ranks for _, _, ranks in self._units_of(rank)]

    def name(self, rank: int, slow: Collection[int]) -> SlowUnit:
        """Return the largest slow unit that contains `rank`; `slow` includes the rank."""
        node, stage = self._generation.node(rank), self._generation.stage(rank)
        best = SlowUnit((rank,), f"straggler:{rank}", node, stage)
        for kind, label, ranks in self._units_of(rank):
            joined = tuple(member for member in ranks if member in slow)
            if len(joined) > len(best.ranks) and len(joined) >= MOST * len(ranks):
                best = SlowUnit(joined, f"straggler:{kind}:{label}", *self._shared(joined), kind)
        return best

    def _units_of(self, rank: int) -> list[tuple[str, object, list[int]]]:
        """Return (kind, label, ranks), the node first: it is to blame if both have the same
        ranks."""
        labels: list[tuple[str, object]] = [
            ("node", self._generation.node(rank)),
            ("stage", self._generation.stage(rank)),
        ]
        return [(*label, self._units[label]) for label in labels if label in self._units]

    def _shared(self, ranks: tuple[int, ...]) -> tuple[str | None, int | None]:
        nodes = {self._generation.node(rank) for rank in ranks}
        stages = {self._generation.stage(rank) for rank in ranks}
        return (
            nodes.pop() if len(nodes) == 1 else None,
            stages.pop() if len(stages) == 1 else None,
        )


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return "ranks " + ", ".join(map(str, ranks))
