"""Ranks that stay in their processes: killed or moved, the run ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_demo.cluster import GPUS_PER_NODE
from tests.waiting import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.campaign]

NODE_COUNT = 3  # one is a spare
RANKS = 2 * GPUS_PER_NODE
STEPS = 200
LONG_STEPS = 3000  # long enough for a move to pay
KILLS = 6
POLICY = {
    "restarts_per_hour": 1000,
    "cycles_without_progress": 20,
    "backoff_seconds": 0.1,
    "backoff_maximum_seconds": 0.5,
}
# All ranks are killed in turn: no node is to blame for it.
NO_QUARANTINE = {"quarantine_share": 0.0}


class Run:
    """A job of the script, and the files that it writes."""

    def __init__(
        self, client: httpx.Client, directory: Path, steps: int = STEPS, **policy: float
    ) -> None:
        directory.mkdir()
        self._client = client
        self._directory = directory
        script = Path(__file__).with_name("resilient_trainer.py")
        body = {
            "name": directory.name,
            "argv": [sys.executable, str(script), str(directory), str(steps)],
            "topology": {"dp": RANKS, "pp": 1, "tp": 1},
            "environment": {
                "OMP_NUM_THREADS": "1",
                "PACELINE_PRELOAD": "torch.distributed,paceline.checkpoints.checkpoints",
                "PACELINE_MEMORY_OVERHEAD": "100",
                "PACELINE_MEMORY_DIRECTORY": str(directory / "memory"),
            },
            "mode": "auto",
            "policy": POLICY | policy,
        }
        self._id = client.post("/jobs", json=body).raise_for_status().json()["id"]

    @property
    def state(self) -> str:
        return str(self._get("")["state"])

    def steps(self, rank: int) -> int:
        """Return the number of steps that a rank has finished, repeated ones included."""
        return len(self.lines(f"rank{rank}"))

    def lines(self, name: str) -> list[str]:
        path = self._directory / name
        return path.read_text().splitlines() if path.exists() else []

    def node(self, rank: int) -> str:
        return str(self._get("/ranks")["items"][rank]["node"])

    def slow_down(self, node: str) -> None:
        """Make the ranks of a node slow."""
        (self._directory / f"slow-{node}").touch()

    def restarts(self) -> list[Any]:
        items = self._client.get(f"/actions?job={self._id}").raise_for_status().json()["items"]
        return [item for item in items if item["kind"] == "restart"]

    def entries(self) -> list[list[str]]:
        """Return generation, process and source of the state for each entry of the function."""
        return [line.split() for rank in range(RANKS) for line in self.lines(f"entries{rank}")]

    def finals(self) -> list[str]:
        return [(self._directory / f"final{rank}").read_text() for rank in range(RANKS)]

    def kill(self, rank: int) -> None:
        pid = self._get("/ranks")["items"][rank]["pid"]
        if pid is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # between its end and the next generation

    def _get(self, path: str) -> Any:
        return self._client.get(f"/jobs/{self._id}{path}").raise_for_status().json()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_ranks_are_killed_ends_bit_for_bit_the_same(
    client: httpx.Client, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    whole = Run(client, tmp_path / "whole", **NO_QUARANTINE)
    wait_for(lambda: whole.state == "finished", "the run without a kill", 400.0)
    killed = Run(client, tmp_path / "killed", **NO_QUARANTINE)
    for number in range(KILLS):
        witness = chance.randrange(RANKS)
        aim = killed.steps(witness) + chance.randint(5, 20)
        wait_for(lambda: killed.steps(witness) >= aim, f"kill {number}", 400.0)  # noqa: B023
        time.sleep(chance.random() * 0.05)  # anywhere in a step
        killed.kill(chance.randrange(RANKS))
        if number % 3 == 2:  # once more, anywhere in the recovery
            time.sleep(chance.random() * 0.6)
            killed.kill(chance.randrange(RANKS))
    wait_for(lambda: killed.state == "finished", "the end", 400.0)
    for rank in range(RANKS):
        assert len(whole.lines(f"rank{rank}")) == STEPS
        assert set(killed.lines(f"rank{rank}")) == set(whole.lines(f"rank{rank}"))
    assert killed.finals() == whole.finals()
    entries = killed.entries()
    pids = [pid for _, pid, _ in entries]
    print(f"{len(pids)} entries of {len(set(pids))} processes", entries)
    assert len(pids) - len(set(pids)) >= KILLS, "ranks stayed in their processes"
    assert "memory" in {source for _, _, source in entries}


@pytest.mark.timeout(900)
def test_a_run_that_leaves_a_slow_node_ends_bit_for_bit_the_same(
    client: httpx.Client, tmp_path: Path
) -> None:
    whole = Run(client, tmp_path / "whole", LONG_STEPS)
    wait_for(lambda: whole.state == "finished", "the run without a move", 400.0)
    moved = Run(client, tmp_path / "moved", LONG_STEPS)
    wait_for(lambda: moved.steps(0) >= 200, "steps")
    left = moved.node(3)
    moved.slow_down(left)
    wait_for(lambda: moved.state == "finished", "the end", 600.0)
    (action,) = moved.restarts()
    assert (action["state"], action["exclude_nodes"], action["lost_steps"]) == ("done", [left], 0)
    for rank in range(RANKS):
        assert moved.lines(f"rank{rank}") == whole.lines(f"rank{rank}"), "no step was repeated"
    assert moved.finals() == whole.finals()
    entries = moved.entries()
    assert len(entries) == 2 * RANKS
    assert len({pid for _, pid, _ in entries}) == RANKS + GPUS_PER_NODE, "the others stayed"
