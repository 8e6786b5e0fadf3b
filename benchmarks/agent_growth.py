"""Growth of the agent's memory over thousands of sweeps, run as fast as possible.

The real agent with its pauses between sweeps cut to a millisecond (`SystemClock.call_later`); all
else, including sending, is unchanged. A single sample of the memory varies with the batches in
flight. So the start is the median of the first ten samples, the end that of the last quarter, and
the slope is of a line through the last three quarters. PACELINE_BENCH_SECONDS is the duration; the
86,400 sweeps of a day take over half an hour.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import numpy as np

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
_EACH_SWEEP, PORTS = "node_infiniband_state_id", 9
DAY = 86_400


def measure() -> Iterator[Result]:
    with FakeNode() as node, Sink() as sink:
        command = [sys.executable, "-c", _FAST, *node.agent_options(sink.url)]
        with node.running("agent", command, node.environment) as agent:
            time.sleep(WARM_SECONDS)
            began = time.monotonic()
            looks = []
            while time.monotonic() - began <= SECONDS:
                looks.append((sink.samples[_EACH_SWEEP] / PORTS, agent.rss_mib))
                time.sleep(1.0)
    sweeps, mib = np.array(looks).T
    warm_up = len(looks) // 4
    slope = float(np.polyfit(sweeps[warm_up:], mib[warm_up:], 1)[0])
    quarters = [float(np.median(quarter)) for quarter in np.array_split(mib, 4)]
    text = ", ".join(f"{quarter:.1f}" for quarter in quarters)
    print(f"agent: median MiB of each quarter {text}", file=sys.stderr)
    yield Result("agent: sweeps run fast", looks[-1][0] - looks[0][0], "")
    grown = quarters[-1] - float(np.median(mib[:10]))
    yield Result("agent: memory grown meanwhile", grown, "MiB", None, GOAL_MIB)
    yield Result("agent: the same of a day, once warm_up", slope * DAY, "MiB", None, GOAL_MIB)
