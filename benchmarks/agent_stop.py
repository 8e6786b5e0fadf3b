"""The time from SIGTERM to an agent until it and its ranks have ended.

Eight ranks ignore SIGTERM. The server responds at once, or after a second, or is dead; or the agent
has an hour's backlog that the server cannot accept in time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

from benchmarks.agent_outage import fill
from benchmarks.harness import Result
from benchmarks.node import FakeNode, RunningProcess, Sink
from paceline_agent.forward.spool import Spool
from paceline_wire.commands import RankSpec, StartRanks
from paceline_wire.topology import Topology

RANKS = 8
GOAL_SECONDS = 5.0
LONGEST_SECONDS = 60
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def measure() -> Iterator[Result]:
    for name, answer_seconds, dead, backlog in (
        ("a server that answers", 0.0, False, False),
        ("a server that takes a second for each answer", 1.0, False, False),
        ("a dead server", 0.0, True, False),
        ("a slow server and an hour's backlog", 0.05, False, True),
    ):
        seconds = _stop(answer_seconds, dead=dead, backlog=backlog)
        yield Result(f"agent: SIGTERM under {name}", seconds, "s", None, GOAL_SECONDS)


def _stop(answer_seconds: float, *, dead: bool, backlog: bool) -> float:
    with FakeNode() as node, Sink() as sink:
        if backlog:
            fill(Spool(node.directory / "node" / "spool", 64 << 20))
        sink.orders.append(_stubborn_ranks())
        with node.agent(sink.url) as agent:
            ranks = _ranks(agent)
            sink.answer_seconds = answer_seconds
            if dead:
                sink.__exit__()
            time.sleep(1.0)
            started = time.monotonic()
            os.kill(agent.pid, signal.SIGTERM)
            os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
            seconds = time.monotonic() - started
            left = [rank.pid for rank in ranks if rank.is_alive]
            if left:
                raise RuntimeError(f"ranks {left} outlived their agent")
    return seconds


def _ranks(agent: RunningProcess) -> tuple[RunningProcess, ...]:
    deadline = time.monotonic() + LONGEST_SECONDS
    while len(ranks := agent.family().having("SIG_IGN")) < RANKS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(ranks)} of {RANKS} ranks were started")
        time.sleep(0.1)
    return ranks


def _stubborn_ranks() -> StartRanks:
    return StartRanks(
        command_id=1,
        job="bench",
        generation=0,
        topology=Topology(dp=RANKS),
        ranks=[RankSpec(rank, rank) for rank in range(RANKS)],
        argv=[sys.executable, "-S", "-c", STUBBORN],
        master_address="127.0.0.1",
        master_port=29500,
    )
