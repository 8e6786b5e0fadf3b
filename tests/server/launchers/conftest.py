"""A real Slurm cluster, and agents on nodes of this host."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from node_agents import Agents
from slurm_cluster import SlurmCluster, missing


@pytest.fixture(scope="module")
def slurm(wait_for: Callable[..., Any]) -> Iterator[SlurmCluster]:
    """Four idle nodes, n0 to n3. Skips where Slurm is not installed."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))  # munge wants a short path
    cluster = SlurmCluster(directory, nodes=4)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]  # the server is in this process
    try:
        cluster.start(wait_for)
        yield cluster
    finally:
        cluster.close()
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def start_agents(wait_for: Callable[..., Any]) -> Iterator[Callable[..., Agents]]:
    """Return a function that starts an agent on each of the nodes, for a server."""
    started: list[Agents] = []

    def start(url: str, nodes: Iterable[str]) -> Agents:
        agents = Agents(Path(tempfile.mkdtemp(prefix="paceline-agents-")), url)
        for node in nodes:
            agents.start(node)
        started.append(agents)
        wait_for(agents.are_up, "the agents")
        return agents

    yield start
    for agents in started:
        agents.stop()
        shutil.rmtree(agents.directory, ignore_errors=True)
