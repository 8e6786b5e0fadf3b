"""A cluster per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline_demo.cluster import Cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start a cluster with as many nodes as the test's module needs (`NODE_COUNT`)."""
    started = Cluster(node_count=request.module.NODE_COUNT, port=0)
    try:
        started.start()
        yield started
    finally:
        orphans = started.close()
        started.remove_logs()
    assert orphans == 0
