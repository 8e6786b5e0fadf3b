"""The cost of the entry point of `PACELINE=1` to `import torch`, in processes without the variable.

Torch asks for the entry points of all distributions in any case. Paceline's own share is to load
its module and to call it. Each sample is a process of its own, as an import is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter

from benchmarks.harness import Result

PROCESSES = 9
GOAL_MILLISECONDS = 3.0
OFF = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from importlib.metadata import entry_points
from time import perf_counter_ns
[entry] = [each for each in entry_points(group="torch.backends") if each.name == "paceline"]
started = perf_counter_ns()
entry.load()()
print((perf_counter_ns() - started) / 1e6)
"""


def measure() -> Iterator[Result]:
    alone = [float(_run(OFF)) for _ in range(PROCESSES)]
    yield Result("entry point without PACELINE", median(alone), "ms", goal=GOAL_MILLISECONDS)
    # With and without the whole scan of entry points, in turns: an upper bound, with its noise.
    pairs = [(_import_seconds("1"), _import_seconds("0")) for _ in range(PROCESSES)]
    added = median(1e3 * (with_scan - without) for with_scan, without in pairs)
    yield Result(
        "import torch, added by its scan of all entry points",
        added,
        "ms",
        baseline=median(1e3 * without for _, without in pairs),
    )


def _run(source: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PACELINE"}
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment | settings,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _import_seconds(autoload: str) -> float:
    started = perf_counter()
    _run("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    return perf_counter() - started
