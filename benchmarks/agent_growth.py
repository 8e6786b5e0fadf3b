"""Whether the agent's memory grows: thousands of sweeps as fast as they go.

The real agent, its pauses between sweeps cut short at the one seam they go through
(`SystemClock.call_later`); everything else, sending included, is as always.
PACELINE_BENCH_SECONDS is for how long: a day's 86,400 sweeps take about half an hour.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from benchmarks.harness import Result
from benchmarks.node import FakeNode, Sink

WARM_SECONDS = 20
SECONDS = int(os.environ.get("PACELINE_BENCH_SECONDS", "60"))
GOAL_MIB = 2.0
_FAST = """
import asyncio
from paceline_agent import clock
from paceline_agent.__main__ import main
def call_later(self, seconds, callback):
    return asyncio.get_running_loop().call_later(min(seconds, 0.001), callback)
clock.SystemClock.call_later = call_later
main(prog_name="paceline agent")
"""
_EACH_SWEEP = "node_infiniband_state_id"  # of nine ports


def measure() -> Iterator[Result]:
    with FakeNode() as node, Sink() as sink:
        command = [sys.executable, "-c", _FAST, *node.agent_options(sink.url)]
        with node.running("agent", command, node.environment) as agent:
            time.sleep(WARM_SECONDS)
            before_mib, before = agent.rss_mib, sink.samples[_EACH_SWEEP]
            time.sleep(SECONDS)
            grown_mib = agent.rss_mib - before_mib
            sweeps = (sink.samples[_EACH_SWEEP] - before) / 9
    yield Result("agent: sweeps run fast", sweeps, "")
    yield Result("agent: memory grown meanwhile", grown_mib, "MiB", None, GOAL_MIB)
