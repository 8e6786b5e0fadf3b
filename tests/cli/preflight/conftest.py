"""Nodes that are network namespaces: real interfaces, real sockets, real rate limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from paceline_evaluation.foreign.network_nodes import NetworkNodes, why_unavailable


@pytest.fixture
def network_nodes() -> Iterator[NetworkNodes]:
    """Three nodes; the test is skipped if they cannot be created."""
    if (reason := why_unavailable()) is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    with ExitStack() as cleanup:
        yield NetworkNodes(3, cleanup)
