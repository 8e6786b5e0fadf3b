"""The delay from a change of a GPU's temperature until the server's API returns it.

A real agent and a real server. The emulated GPU gets a new temperature at a random moment, and the
API is polled until it returns that value. Up to a second of the delay is the wait for the next
sweep.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.harness import Result
from benchmarks.node import FakeNode, free_port

CHANGES = 40
GOAL_SECONDS = 2.0
LONGEST_SECONDS = 20.0
START_SECONDS = 120.0  # for server and agent, on a busy machine


def measure() -> Iterator[Result]:
    chance, port = random.Random(1), free_port()
    url = f"http://127.0.0.1:{port}"
    with FakeNode() as node:
        command = [sys.executable, "-m", "paceline_cli", "server", "--port", str(port)]
        command += ["--database-url", f"sqlite:///{node.directory / 'server.db'}"]
        with node.running("server", command), node.agent(url):
            await_shown(url, None, START_SECONDS)
            taken = []
            for number in range(CHANGES):
                time.sleep(chance.random())
                celsius = 40 + number % 40
                node.gpus.set(0, temperature_celsius=celsius)
                started = time.monotonic()
                await_shown(url, celsius)
                taken.append(time.monotonic() - started)
    name = "a GPU's change queryable, sweep included"
    yield Result(f"{name}: median", median(taken), "s")
    yield Result(f"{name}: p99", sorted(taken)[-1], "s", None, GOAL_SECONDS)


def await_shown(url: str, celsius: int | None, seconds: float = LONGEST_SECONDS) -> None:
    """Wait until the API returns this temperature for GPU 0; None: any temperature."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        shown = _shown(url)
        if shown is not None and (celsius is None or shown == celsius):
            return
        time.sleep(0.01)
    raise RuntimeError(f"GPU 0 was not shown at {celsius} within {seconds:.0f} s")


def _shown(url: str) -> float | None:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/nodes") as answer:
            nodes: list[dict[str, Any]] = json.load(answer)["items"]
    except OSError:
        return None  # not up yet
    gpus = nodes[0]["gpus"] if nodes else []
    return gpus[0].get("temperature_celsius") if gpus else None
