"""A job on simulated agents."""

from __future__ import annotations

import pytest

from .simulator import World


@pytest.fixture
def world() -> World:
    """Eight ranks on node-0..node-3, node-4 spare, some steps done."""
    world = World()
    world.until_running(1)
    world.run(10.0)
    return world
