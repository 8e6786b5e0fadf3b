"""What-if analysis: CPU time against the published artifact's, and at 10,240 ranks.

The traces are synthetic, of the sizes on which the artifact was timed (1.65 and 1.33 CPU seconds on
this kind of machine, including interpreter start). The analysis is everything from the rows to the
last figure, without imports and reading; `end to end` is the command on a file. Online is the work
in the engine of a running job: from the step model's tables to the summary and a dozen repairs.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Result
from paceline_server.whatif.analysis import analyze
from paceline_server.whatif.online import RunReplay
from paceline_server.whatif.schedules import actions, simulate
from paceline_server.whatif.trace import align
from paceline_wire.topology import Topology

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server" / "whatif"))

from played_run import PlayedRun
from synthetic_trace import SyntheticRun, coded

REPEATS = 5
# name -> (run, the artifact's CPU seconds)
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "64 ranks": ({"dp": 4, "pp": 4, "tp": 4, "microbatches": 32, "steps": 44}, 1.65),
    "128 ranks": ({"dp": 32, "pp": 2, "tp": 2, "microbatches": 16, "steps": 24}, 1.33),
}
LARGE: dict[str, Any] = {"dp": 160, "pp": 8, "tp": 8, "microbatches": 32, "steps": 1}
WIDE: dict[str, Any] = {"dp": 1280, "pp": 8, "tp": 1, "microbatches": 16, "steps": 1}
# name -> (topology, steps, goal in CPU seconds)
ONLINE = {
    "1,024 ranks, 8 steps": (Topology(16, 8, 8), 8, 0.5),
    "10,240 ranks, 1 step": (Topology(160, 8, 8), 1, 1.0),
}
QUESTIONS = 12


def measure() -> Iterator[Result]:
    for name, (options, artifact_seconds) in PUBLISHED.items():
        columns = SyntheticRun(jitter=0.1, transfer_jitter=0.2, **options).columns()
        yield Result(
            f"what-if analysis ({name}, {len(columns['step']):,} operations)",
            _analysis_seconds(columns),
            "CPU s",
            baseline=artifact_seconds,
            goal=artifact_seconds / 20,
        )
        yield Result(
            f"paceline analyze ({name})",
            _command_seconds(columns),
            "CPU s",
            baseline=artifact_seconds,
            goal=artifact_seconds / 3,
        )
    for name, options in (("160 dp x 8 pp x 8 tp", LARGE), ("1280 dp x 8 pp", WIDE)):
        columns = SyntheticRun(jitter=0.1, transfer_jitter=0.2, **options).columns()
        yield Result(
            f"what-if analysis (10,240 ranks, {name}, 1 step)",
            _analysis_seconds(columns),
            "CPU s",
            goal=1.0,
        )
    for name, (topology, steps, goal) in ONLINE.items():
        seconds = _online_seconds(topology, steps)
        yield Result(f"what-if online ({name}, a dozen questions)", seconds, "CPU s", goal=goal)
    started = process_time()
    simulate(actions("interleaved", 32, 256, 4), lambda _stage, _action: 1.0)
    seconds = process_time() - started
    yield Result("schedule simulated (p=32, m=256, v=4)", seconds, "CPU s", goal=1.0)


def _online_seconds(topology: Topology, steps: int) -> float:
    run = PlayedRun(topology, microbatches=32, steps=steps, jitter=0.05, slow={5: 1.3})
    timings, _ = run.play()
    times = []
    for _ in range(REPEATS):
        started = process_time()
        replay = RunReplay(timings, topology, {})
        assert replay.fixes()
        for rank in range(QUESTIONS):
            replay.speedup(ranks=[rank])
        times.append(process_time() - started)
    return median(times)


def _analysis_seconds(columns: dict[str, Any]) -> float:
    rows, optypes = coded(columns)
    times = []
    for _ in range(REPEATS):
        started = process_time()
        analyze(align(rows, optypes))
        times.append(process_time() - started)
    return median(times)


def _command_seconds(columns: dict[str, Any]) -> float:
    """Return user and system time of the whole process."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.parquet"
        pq.write_table(pa.table(columns), path)
        times = []
        for _ in range(REPEATS):
            before = _children_seconds()
            command = [sys.executable, "-m", "paceline_cli", "analyze", str(path), "--json"]
            subprocess.run(command, check=True, capture_output=True)
            times.append(_children_seconds() - before)
    return median(times)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
