"""A real Prometheus scrapes the demo: every query of the dashboards returns data."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.ports import free_port

from .dashboards import (
    DASHBOARD,
    DCGM_EXPORTER,
    DEPLOY,
    NODE_EXPORTER,
    names,
    own_queries,
    substituted,
)

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="Prometheus is not installed (Debian: apt-get install prometheus)",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: no emulated GPUs"),
]
_PATIENCE_SECONDS = 600
_DEMO = ("--dp", "2", "--pp", "2", "--tp", "1", "--faults", "throttle:0", "--mode", "observe")

Query = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Query]:
    """Return the query function of a Prometheus that scraped a demo until its fault was
    detected."""
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(TemporaryDirectory(prefix="paceline-prometheus-")))
        log = cleanup.enter_context(_demo(scratch))
        (server,) = set(re.findall(r"dashboard: http://(\S+)", log.read_text()))
        agents = [
            re.findall(r"/metrics on (\S+)", path.read_text())[-1]
            for path in sorted(scratch.glob("paceline-demo-*/node-*.log"))
        ]
        targets = {"server": [server], "agents": agents}
        configuration = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        for job in configuration["scrape_configs"]:
            job["static_configs"] = [{"targets": targets.pop(job["job_name"])}]
        assert not targets, "each of the demo's programs is in the scrape configuration"
        query = cleanup.enter_context(_running(scratch, configuration))
        _until(lambda: "staying up at" in log.read_text())
        yield query


@contextmanager
def _demo(scratch: Path) -> Iterator[Path]:
    """Return the demo's log once its server and agents are up."""
    log = scratch / "demo.log"
    command = [sys.executable, "-m", "paceline_cli", "demo", *_DEMO, "--port", str(free_port())]
    variables = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        demo = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
    try:
        _until(lambda: "dashboard:" in log.read_text() or demo.poll() is not None)
        yield log
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=120)


@contextmanager
def _running(directory: Path, configuration: Any) -> Iterator[Query]:
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={file}", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={directory / 'data'}", "--log.level=error"]
    process = subprocess.Popen(command)

    def query(expression: str) -> list[Any]:
        """Run a query over the last half hour, as Grafana does."""
        now = time.time()
        asked = {"query": expression, "start": now - 1800, "end": now, "step": 5}
        url = f"http://{address}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}")

    try:
        yield query
    finally:
        process.terminate()
        process.wait(timeout=60)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.5)


def test_every_query_returns_data(prometheus: Query) -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["global"]["scrape_interval"]
    seconds = float(scrape.removesuffix("s"))
    queries = [*own_queries(), *DCGM_EXPORTER, *NODE_EXPORTER]
    empty = [query for query in queries if not prometheus(substituted(query, seconds))]
    assert empty == []


def test_variables_have_values(prometheus: Query) -> None:
    asked = [
        each["query"]["query"] for each in DASHBOARD["templating"]["list"] if "refresh" in each
    ]
    assert asked
    for query in asked:
        found = re.fullmatch(r"label_values\((\S+), (\w+)\)", query)
        assert found is not None, query
        assert prometheus(f'{found[1]}{{{found[2]}!=""}}')


def test_only_rdma_is_missing_in_the_demo(prometheus: Query) -> None:
    """Otherwise a query that falls back to another metric could hide a wrong name."""
    missing = {name for name in names(own_queries()) if not prometheus(name)}
    assert {name for name in missing if not name.startswith("node_infiniband_")} == set()
