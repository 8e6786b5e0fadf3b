"""How large the played job is, how fast it goes and who is slow when."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fleet.nodes import RANKS_PER_NODE
from paceline_wire.topology import Topology

_SLOW = 1.6
_AT_ONCE = 4  # ranks slow together, each on a node and replica of its own


@dataclass(frozen=True)
class Load:
    name: str
    topology: Topology
    microbatches: int
    step_seconds: float
    steps: int
    batch_seconds: float  # between two batches of a node
    healthy_steps: int  # before the first fault, and between two
    slow_steps: int

    @property
    def nodes(self) -> int:
        return self.topology.world_size // RANKS_PER_NODE

    def slow_ranks(self, step: int) -> dict[int, float]:
        """By rank, the multiple of its work. Each time others."""
        number, within = divmod(step, self.healthy_steps + self.slow_steps)
        if within < self.healthy_steps:
            return {}
        world = self.topology.world_size
        first = number * 7 * RANKS_PER_NODE + number % RANKS_PER_NODE
        return {
            (first + one * (world // _AT_ONCE) + 16 * one) % world: _SLOW for one in range(_AT_ONCE)
        }
