"""Where each rank is in the grid (stage, replica, shard) that steps are measured on.

A replica processes data of its own: a coordinate on dp and ep. The shards of a replica divide one
microbatch between them: a coordinate on cp and tp. All arithmetic with ranks is done here, because
frameworks number them differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paceline_wire.topology import Axis, Topology

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Coordinates by rank, and ranks by coordinates; the arrays are read-only."""

    stage: Ints  # [rank]
    replica: Ints  # [rank]
    shard: Ints  # [rank]
    cp_rank: Ints  # [rank]
    ranks: Ints  # [stage, replica, shard]

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return int(self.ranks.shape[0])

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(self.ranks.shape[1])

    @property
    def shards(self) -> int:
        """The number of shards of a replica, on each stage."""
        return int(self.ranks.shape[2])


@lru_cache(maxsize=64)
def grid_of(topology: Topology) -> RankGrid:
    """Return the grid of a topology."""
    world_size = topology.world_size
    numbers = np.array(topology.numbers, np.int64) if topology.numbers else np.arange(world_size)
    strides = topology.strides()

    def on(axis: Axis) -> Ints:
        position: Ints = numbers // strides[axis] % topology.size(axis)
        return position

    stage, cp_rank = on("pp"), on("cp")
    replica = on("dp") * topology.ep + on("ep")
    shard = cp_rank * topology.tp + on("tp")
    ranks = np.empty((topology.pp, topology.replicas, topology.cp * topology.tp), np.int64)
    ranks[stage, replica, shard] = np.arange(world_size)
    grid = RankGrid(stage, replica, shard, cp_rank, ranks)
    for array in (stage, replica, shard, cp_rank, ranks):
        array.setflags(write=False)
    return grid
