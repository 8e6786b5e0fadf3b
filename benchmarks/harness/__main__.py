"""`python -m benchmarks.harness NAME`: run one benchmark, print its rows as JSON lines."""

from __future__ import annotations

import importlib
import json
import signal
import sys

from benchmarks.harness import Result

signal.signal(
    signal.SIGTERM, signal.default_int_handler
)  # SIGTERM must also end the started processes

for result in importlib.import_module(f"benchmarks.{sys.argv[1]}").measure():
    print(json.dumps(result.row() if isinstance(result, Result) else result), flush=True)
