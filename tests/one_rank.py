"""A recorder of a job with one rank, without the process-wide hooks."""

from __future__ import annotations

from pathlib import Path

from paceline.recorder import Recorder
from paceline_wire.ring import Identity, create
from paceline_wire.topology import Coordinates, Topology


def recorder(path: Path) -> Recorder:
    """Return a recorder that writes a new ring."""
    identity = Identity(
        job="j",
        generation=0,
        rank=0,
        local_rank=0,
        world_size=1,
        topology=Topology(),
        coordinates=Coordinates(),
        pid=1,
        host="h",
        clock_offset_ns=0,
        started_ns=0,
    )
    return Recorder(create(path, identity))
