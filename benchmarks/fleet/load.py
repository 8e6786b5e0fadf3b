"""The size and pace of the simulated job, and its slow ranks."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fleet.nodes import RANKS_PER_NODE
from paceline_wire.topology import Topology

_SLOW = 1.6
_AT_ONCE = 4  # ranks that are slow at a time, each on its own node and replica


@dataclass(frozen=True)
class Load:
    name: str
    topology: Topology
    microbatches: int
    step_seconds: float
    steps: int
    batch_seconds: float  # between batches of a node
    healthy_steps: int  # before the first fault, and between faults
    slow_steps: int

    @property
    def nodes(self) -> int:
        return self.topology.world_size // RANKS_PER_NODE

    def slow_ranks(self, step: int) -> dict[int, float]:
        """Return the work factor of each slow rank; the slow ranks change over time."""
        number, within = divmod(step, self.healthy_steps + self.slow_steps)
        if within < self.healthy_steps:
            return {}
        world = self.topology.world_size
        first = number * 7 * RANKS_PER_NODE + number % RANKS_PER_NODE
        return {
            (first + one * (world // _AT_ONCE) + 16 * one) % world: _SLOW for one in range(_AT_ONCE)
        }
