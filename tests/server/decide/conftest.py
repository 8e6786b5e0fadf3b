"""A job on simulated agents."""

from __future__ import annotations

import pytest

from .simulator import World


@pytest.fixture
def world() -> World:
    """A job of eight ranks on node-0 to node-3, with spare node-4, after some steps."""
    world = World()
    world.until_running(1)
    world.run(10.0)
    return world
