"""A server that could not receive for a while does not count nodes that still send as lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from simulated_node import SimulatedNode, post_job, stop_all

STOPPED_SECONDS = 8.0  # longer than a node's lease


class Watched:
    """A server process that trains a job on three nodes."""

    def __init__(self, process: Any, wait_for: Callable[..., Any]) -> None:
        self.process = process
        self.wait_for = wait_for
        self.client = httpx.Client(base_url=process.url(), timeout=60.0, verify=False)
        self.nodes = [SimulatedNode(f"node-{number}", process.url()) for number in range(3)]
        for node in self.nodes:
            node.start()
        self.job_id = post_job(process.url(), dp=3, mode="observe")
        self.wait_for_step(5)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: (self.job()["step"] or 0) >= step, f"step {step}", 60.0)

    def job(self) -> Any:
        return self.client.get(f"/api/v1/jobs/{self.job_id}").raise_for_status().json()

    def lost(self) -> list[str]:
        return [each["node"] for each in self.incidents() if each["cause"] == "node lost"]

    def incidents(self) -> list[Any]:
        answer = self.client.get(f"/api/v1/incidents?job={self.job_id}").raise_for_status()
        found: list[Any] = answer.json()["items"]
        return found

    def go_on(self, steps: int) -> None:
        self.wait_for_step(max(rank.step for node in self.nodes for rank in node.ranks.values()))
        self.wait_for_step(self.job()["step"] + steps)

    def stop(self) -> None:
        self.process.signal(signal.SIGCONT)
        stop_all(self.nodes)
        self.client.close()


@pytest.fixture
def watched(run_process: Callable[..., Any], wait_for: Callable[..., Any]) -> Iterator[Watched]:
    made = Watched(run_process("--port", "0"), wait_for)
    yield made
    made.stop()


ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@ON_SQLITE
def test_a_server_that_was_stopped_counts_no_node_as_lost(watched: Watched) -> None:
    watched.process.signal(signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    watched.process.signal(signal.SIGCONT)
    watched.go_on(5)
    assert watched.incidents() == []


@pytest.mark.campaign
@ON_SQLITE
def test_a_server_with_little_cpu_time_counts_no_node_as_lost(watched: Watched) -> None:
    """Each pause is too short to be detected as a pause."""
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        watched.process.signal(signal.SIGSTOP)
        time.sleep(1.7)
        watched.process.signal(signal.SIGCONT)
        time.sleep(0.05)
    watched.go_on(5)
    assert watched.lost() == []
    silent = watched.nodes[1]
    silent.stop()
    watched.wait_for(lambda: watched.lost() == [silent.agent_id], "the lost node", 60.0)
