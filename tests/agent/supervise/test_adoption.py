"""A killed and restarted agent continues with its ranks and their rings."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline_wire.batch import RankExited, RankStarted
from paceline_wire.spans import from_columns, unpack
from tests.agent.command_factory import marker, start_ranks, stop

WRITER = [sys.executable, str(Path(__file__).parents[1] / "ring_writer.py"), "2000"]
PATIENT = ("--orphan-grace-seconds", "60")  # a busy host starts the next agent late
Fixture = Callable[..., Any]


def span_indices(server: Any, rank: int) -> list[int]:
    blocks = [block for batch in list(server.batches) for block in batch.spans]
    return [
        span.index
        for block in blocks
        if block.rank == rank
        for span in unpack(from_columns(block.columns))
    ]


def lost(server: Any) -> int:
    return sum(block.lost for batch in list(server.batches) for block in batch.spans)


def test_running_ranks_and_their_rings_are_adopted_and_no_span_is_lost_or_sent_twice(
    start_agent: Fixture,
    server: Any,
    order: Fixture,
    wait_for: Fixture,
    is_alive: Fixture,
    processes_with: Fixture,
) -> None:
    agent = start_agent(*PATIENT)
    assert order(start_ranks("", 2, 4, argv=WRITER)).ok
    server.commands.clear()
    for _ in range(3):
        before = len(span_indices(server, 1))
        wait_for(lambda before=before: len(span_indices(server, 1)) > before + 500)
        agent.stop(signal.SIGKILL)
        agent = start_agent(*PATIENT)
    pids = [started.pid for started in server.events(RankStarted)]
    before = {rank: len(span_indices(server, rank)) for rank in (0, 1)}
    wait_for(lambda: all(len(span_indices(server, rank)) > before[rank] + 1000 for rank in (0, 1)))
    assert all(map(is_alive, pids)), "the same processes"
    assert len(server.events(RankStarted)) == 2, "none was started again"
    assert order(stop(4)).ok
    wait_for(lambda: len(server.events(RankExited)) == 2)
    assert {(event.pid, event.commanded) for event in server.events(RankExited)} == {
        (pid, True) for pid in pids
    }
    assert not processes_with(marker(agent))
    for rank in (0, 1):
        found = span_indices(server, rank)
        assert found == list(range(len(found))), Counter(found).most_common(3)
    assert lost(server) == 0
    assert agent.log_text().count("adopted 2 ranks") == 3


def test_a_rank_that_ended_without_an_agent_is_reported_by_the_next_agent(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    first = start_agent(*PATIENT)
    assert order(start_ranks("", 2, 4, argv=WRITER)).ok
    wait_for(lambda: len(span_indices(server, 1)) > 100)
    first.stop(signal.SIGKILL)
    victim, other = server.events(RankStarted)
    os.kill(victim.pid, signal.SIGSEGV)
    server.commands.clear()
    start_agent()
    (exited,) = wait_for(lambda: server.events(RankExited))
    assert (exited.pid, exited.signal, exited.commanded) == (victim.pid, signal.SIGSEGV, False)
    assert other.pid != victim.pid
    found = span_indices(server, victim.rank)
    assert found == list(range(len(found))), "its ring was read to the end"


def test_ranks_that_no_agent_adopts_end_with_the_grace_period(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent("--orphan-grace-seconds", "1")
    assert order(start_ranks("", 2, 4, argv=WRITER)).ok
    killed = time.monotonic()
    agent.stop(signal.SIGKILL)
    wait_for(lambda: not processes_with(marker(agent)))
    assert time.monotonic() - killed >= 1, "they wait for an agent"


def test_adopted_ranks_die_with_their_guard_and_are_reported(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    first = start_agent(*PATIENT)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"
    argv = [sys.executable, "-c", f"import os; os.dup2(os.pipe()[0], 0); {child}"]
    assert order(start_ranks("", 2, 4, argv=argv)).ok
    wait_for(lambda: len(processes_with(marker(first))) == 4)
    first.stop(signal.SIGKILL)
    server.commands.clear()
    second = start_agent()
    wait_for(lambda: "adopted 2 ranks" in second.log_text())
    rank = server.events(RankStarted)[0].pid
    stat = Path(f"/proc/{rank}/stat").read_text()
    guard = int(stat[stat.rindex(")") + 2 :].split()[1])
    stat = Path(f"/proc/{guard}/stat").read_text()
    for pid in (int(stat[stat.rindex(")") + 2 :].split()[1]), guard):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(server.events(RankExited)) == 2)
    wait_for(lambda: not processes_with(marker(second)))
