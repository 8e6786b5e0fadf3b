"""A real agent with more spans than a node writes: each is sent once, none is lost.

`benchmarks/agent_rings.py` measures the CPU time per span.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from paceline_wire.batch import RankExited, RankState

Fixture = Callable[..., Any]
RANKS, SPANS, ROUNDS = 8, 10_000, 2
LIVES = 12


def counts(server: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for batch in list(server.batches):
        for block in batch.spans:
            assert block.lost == 0
            found[block.rank] = found.get(block.rank, 0) + block.count
    return found


def test_everything_that_eight_ranks_write_at_once_is_sent(
    start_agent: Fixture, server: Any, wait_for: Fixture, make_rank: Fixture
) -> None:
    agent = start_agent()
    wait_for(lambda: server.batches)
    ranks = [make_rank(agent.directory, rank) for rank in range(RANKS)]
    for number in range(1, ROUNDS + 1):
        for rank in ranks:
            rank.write(SPANS)
        whole = dict.fromkeys(range(RANKS), number * SPANS)
        wait_for(lambda whole=whole: counts(server) == whole, seconds=60)
    assert agent.stop() == 0


def test_short_lived_ranks_lose_nothing_and_leave_nothing(
    start_agent: Fixture, server: Any, wait_for: Fixture, make_rank: Fixture
) -> None:
    """Each rank is killed once the agent has found it, right after half of its spans were
    written."""
    agent = start_agent()
    wait_for(lambda: server.batches)
    lives = []
    for number in range(LIVES):
        process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        lives.append((process, make_rank(agent.directory, number, process.pid)))
        lives[-1][1].write(500)
    wait_for(lambda: len(seen(server)) == LIVES)
    for process, rank in lives:
        rank.write(500)
        process.kill()
        process.communicate()
    wait_for(lambda: len(server.events(RankExited)) == LIVES)
    wait_for(lambda: counts(server) == dict.fromkeys(range(LIVES), 1000))
    wait_for(lambda: not list((agent.directory / "rings").glob("*.ring")))
    assert agent.stop() == 0


def seen(server: Any) -> set[int]:
    """Return the ranks whose process was checked."""
    return {event.rank for event in server.events(RankState) if event.process_state is not None}
