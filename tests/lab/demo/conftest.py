"""A cluster per test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from paceline_demo.cluster import Cluster
from paceline_wire.local_token import find_token


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


@pytest.fixture
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    """Open a client of the cluster's API with the operator's token."""
    headers = {"Authorization": f"Bearer {find_token(cluster.url, 'operator', os.environ)}"}
    url = f"{cluster.url}/api/v1"
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as opened:
        yield opened
