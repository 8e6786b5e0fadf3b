"""The cost of the agent on a node of 8 GPUs and 9 HCAs, compared with prometheus-node-exporter.

The real agent with its NVML worker and its guard, as processes: CPU time per second of all its work
(collect, pack, spool, send), and memory. node_exporter (Debian's package) reads the same InfiniBand
tree and the same /proc and is scraped every second in the same period, so that other load slows
both. A page shared by several processes counts partly in each one's proportional memory, and fully
in each one's resident memory. Without node_exporter its rows are left out, with a message.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator

from benchmarks.harness import Result
from benchmarks.node import FakeNode, RunningProcess, Sink, free_port

WARM_SECONDS = 12
SECONDS = int(os.environ.get("PACELINE_BENCH_SECONDS", "60"))
GOAL_MS, GOAL_MIB, GOAL_VALUES = 5.0, 45.0, 750.0
EXPORTER = "prometheus-node-exporter"


def measure() -> Iterator[Result]:
    with FakeNode() as node, Sink() as sink, node.agent(sink.url) as agent, _exporter(node) as them:
        time.sleep(WARM_SECONDS)
        exporter = None if them is None else them[0]
        theirs = 0.0 if them is None else _scrape(them[1])
        family = agent.family()
        before_ms, before = family.cpu_ms, sink.samples.total()
        exporter_before_ms = exporter.cpu_ms if exporter else 0.0
        started = time.monotonic()
        for _ in range(SECONDS):
            time.sleep(1.0)
            if them is not None:
                _scrape(them[1])
        seconds = time.monotonic() - started
        ms_each_second = (family.cpu_ms - before_ms) / seconds
        values = (sink.samples.total() - before) / seconds
        exporter_ms = (exporter.cpu_ms - exporter_before_ms) / SECONDS if exporter else None
        exporter_mib = exporter.rss_mib if exporter else None
        family = agent.family()
        worker, guard = family.having("worker_process"), family.having("guard.py")
        rss, worker_rss = agent.rss_mib, sum(each.rss_mib for each in worker)
        guard_rss = sum(each.rss_mib for each in guard)
        pss, exporter_pss = family.pss_mib, exporter.pss_mib if exporter else None
        series = len(sink.series)
    yield Result("agent: values per second", values, "/s", goal=GOAL_VALUES, more_is_better=True)
    yield Result("agent: series", series, "")
    if exporter is not None:
        yield Result(f"{EXPORTER}: values per scrape", theirs, "")
    yield Result("agent: a second, all of it", ms_each_second, "ms CPU", exporter_ms, GOAL_MS)
    of_core = None if exporter_ms is None else exporter_ms / 10
    yield Result("agent: of a core", ms_each_second / 10, "%", of_core, 0.5)
    yield Result("agent: resident", rss, "MiB", exporter_mib, GOAL_MIB)
    yield Result("agent: resident, its NVML worker", worker_rss, "MiB")
    yield Result("agent: resident, its guard (two processes)", guard_rss, "MiB")
    yield Result("agent: proportional, all processes", pss, "MiB", exporter_pss)


@contextlib.contextmanager
def _exporter(node: FakeNode) -> Iterator[tuple[RunningProcess, str] | None]:
    """Start node_exporter; yield it and its address."""
    program = shutil.which(EXPORTER)
    if program is None:
        print(f"no rows of {EXPORTER}: it is not installed (apt-get install it)", file=sys.stderr)
        yield None
        return
    address = f"127.0.0.1:{free_port()}"
    options = [f"--path.sysfs={node.sysfs}", f"--web.listen-address={address}", "--log.level=error"]
    with node.running(EXPORTER, [program, *options]) as exporter:
        _scrape(address)
        yield exporter, address


def _scrape(address: str) -> float:
    """Wait until the exporter responds. Return the number of its values."""
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                return float(sum(not line.startswith(b"#") for line in answer))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
