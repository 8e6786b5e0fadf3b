"""A writable ring, and values like those of ranks and agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_wire.ring import Identity, RingFile, create
from paceline_wire.topology import Coordinates, Topology

CAPACITY = 64


@pytest.fixture
def identity() -> Identity:
    return Identity(
        job="job-1",
        generation=2,
        rank=3,
        local_rank=1,
        world_size=8,
        topology=Topology(2, 2, 2),
        coordinates=Coordinates(1, 0, 1),
        pid=4242,
        host="node-1",
        clock_offset_ns=-5,
        started_ns=17,
        gpu_uuid="GPU-0",
        metadata={"schedule": "1f1b"},
    )


@pytest.fixture
def ring(tmp_path: Path, identity: Identity) -> Iterator[RingFile]:
    ring = create(tmp_path / "job-1.g2.r3.ring", identity, CAPACITY)
    yield ring
    ring.close()
