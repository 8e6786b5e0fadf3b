from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from simulated_node import SimulatedNode, stop_all


@pytest.fixture
def nodes(server: Any) -> Iterator[list[SimulatedNode]]:
    fleet = [SimulatedNode(f"node-{number}", server.url) for number in range(3)]
    for node in fleet:
        node.start()
    yield fleet
    stop_all(fleet)
