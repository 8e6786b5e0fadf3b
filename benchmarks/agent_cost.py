"""What the agent costs a node of 8 GPUs and 9 HCAs, beside Debian's prometheus-node-exporter.

The real agent, its NVML worker and its guard, as processes: CPU per second of everything it does
(collect, pack, spool, send) and memory. node_exporter looks at the same InfiniBand tree and the
same /proc, scraped each second. Where it is not installed its rows are left out, and it is said.
"""

from __future__ import annotations

import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator

from benchmarks.harness import Result
from benchmarks.node import FakeNode, Sink, free_port

WARM_SECONDS = 12
SECONDS = 30
GOAL_MS, GOAL_MIB, GOAL_VALUES = 5.0, 45.0, 750.0
EXPORTER = "prometheus-node-exporter"


def measure() -> Iterator[Result]:
    with FakeNode() as node:
        theirs = _exporter(node)
        with Sink() as sink, node.agent(sink.url) as agent:
            time.sleep(WARM_SECONDS)
            family = agent.family()
            before_ms, before = family.cpu_ms, sink.samples.total()
            started = time.monotonic()
            time.sleep(SECONDS)
            seconds = time.monotonic() - started
            ms_each_second = (family.cpu_ms - before_ms) / seconds
            values = (sink.samples.total() - before) / seconds
            family = agent.family()
            worker, guard = family.having("collector_worker"), family.having("guard.py")
            rss, worker_rss = agent.rss_mib, sum(each.rss_mib for each in worker)
            guard_rss = sum(each.rss_mib for each in guard)
            series = len(sink.series)
    yield Result("agent: values per second", values, "/s", goal=GOAL_VALUES, more_is_better=True)
    yield Result("agent: series", series, "")
    cost_ms, exporter_mib, exporter_values = theirs or (None, None, None)
    if theirs is not None:
        yield Result(f"{EXPORTER}: values per scrape", exporter_values or 0, "")
    yield Result("agent: a second, all of it", ms_each_second, "ms CPU", cost_ms, GOAL_MS)
    yield Result("agent: of a core", ms_each_second / 10, "%", cost_ms and cost_ms / 10, 0.5)
    yield Result("agent: resident", rss, "MiB", exporter_mib, GOAL_MIB)
    yield Result("agent: resident, its NVML worker", worker_rss, "MiB")
    yield Result("agent: resident, its guard", guard_rss, "MiB")


def _exporter(node: FakeNode) -> tuple[float, float, float] | None:
    """CPU per scrape, resident memory and values of node_exporter."""
    program = shutil.which(EXPORTER)
    if program is None:
        print(f"no rows of {EXPORTER}: it is not installed (apt-get install it)", file=sys.stderr)
        return None
    address = f"127.0.0.1:{free_port()}"
    options = [f"--path.sysfs={node.sysfs}", f"--web.listen-address={address}", "--log.level=error"]
    with node.running(EXPORTER, [program, *options]) as exporter:
        values = _scrape(address)
        before_ms = exporter.cpu_ms
        for _ in range(SECONDS):
            time.sleep(1.0)
            _scrape(address)
        return (exporter.cpu_ms - before_ms) / SECONDS, exporter.rss_mib, values


def _scrape(address: str) -> float:
    """How many values; waits for the exporter to be up."""
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                return float(sum(not line.startswith(b"#") for line in answer))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
