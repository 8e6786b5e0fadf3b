"""/metrics is valid, and every metric that Paceline's and the stock dashboards query is exposed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from benchmarks.node import FakeNode
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

RING_WRITER = Path(__file__).parents[1] / "agent/ring_writer.py"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROGRAMS = ("agent", "server")
_SECONDS = 120.0
_LINT = 3  # promtool's exit status if it parsed every line

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian: apt-get install prometheus)",
)


@dataclass(frozen=True)
class Scraped:
    """Responses of /metrics by program."""

    classic: dict[str, str]
    openmetrics: dict[str, str]

    @property
    def text(self) -> str:
        return "".join(self.classic.values())


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    """/metrics of a real agent with GPUs, HCAs and a rank, and of a real server."""
    ports = {program: free_port() for program in PROGRAMS}
    with FakeNode() as node:
        interface = node.sysfs / "class" / "net" / "bond0"
        for name in ("carrier_changes", "statistics/rx_dropped", "statistics/tx_dropped"):
            (interface / name).write_text("3\n")
        rings = node.directory / "node" / "rings"
        rings.mkdir(parents=True)
        data = f"sqlite:///{node.directory / 'server.db'}"
        command = [sys.executable, "-m", "paceline_cli", "server"]
        command += ["--host", "127.0.0.1", "--port", str(ports["server"]), "--database-url", data]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_JOB": "j", "PACELINE_GENERATION": "0"}
        rank["PACELINE_RING_DIRECTORY"] = str(rings)
        program = [sys.executable, str(RING_WRITER), "100"]
        url = f"http://127.0.0.1:{ports['server']}"
        with (
            node.running("server", command),
            node.running("rank", program, os.environ | rank),
            node.agent(url, "--metrics-port", str(ports["agent"])),
        ):
            yield _scrape(ports)


def _scrape(ports: dict[str, int]) -> Scraped:
    """Return the response once it has every wanted metric, or after a timeout."""
    deadline = time.monotonic() + _SECONDS
    wanted = names([*own_queries(), *DCGM_EXPORTER, *NODE_EXPORTER])
    while True:
        found = Scraped(
            {program: _get(port, "text/plain") for program, port in ports.items()},
            {program: _get(port, OPENMETRICS) for program, port in ports.items()},
        )
        if wanted <= exposed(found.text) or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def _get(port: int, accept: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""  # not up yet


def exposed(text: str) -> set[str]:
    """Return sample names and the names of families that have no sample yet."""
    found = set(re.findall(r"^([A-Za-z_:][A-Za-z0-9_:]*)[{ ]", text, re.MULTILINE))
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE):
        found.add(f"{name}_total" if kind == "counter" and not name.endswith("_total") else name)
    return found


@pytest.mark.parametrize(
    "queries", [own_queries(), DCGM_EXPORTER, NODE_EXPORTER], ids=["own", "12239", "1860"]
)
def test_every_metric_of_a_dashboard_is_exposed(scraped: Scraped, queries: list[str]) -> None:
    assert names(queries)
    assert names(queries) - exposed(scraped.text) == set()


def test_labels_of_joins_and_sums_exist(scraped: Scraped) -> None:
    (rank,) = re.findall(r"^paceline_rank_info\{(.*)\} 1", scraped.text, re.MULTILINE)
    assert 'job="j"' in rank
    assert 'rank="0"' in rank
    assert re.search(r"^DCGM_FI_DEV_SM_CLOCK\{.*UUID=", scraped.text, re.MULTILINE)
    assert re.search(r"^paceline_collector_success\{.*collector=", scraped.text, re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("parse", [classic, openmetrics], ids=["text", "openmetrics"])
def test_scraped_text_can_be_parsed(
    scraped: Scraped, program: str, parse: Callable[[str], Iterator[object]]
) -> None:
    answers = scraped.openmetrics if parse is openmetrics else scraped.classic
    assert answers[program].endswith("# EOF\n") == (parse is openmetrics)
    assert len(list(parse(answers[program]))) > 10


@needs_promtool
@pytest.mark.parametrize("program", PROGRAMS)
def test_promtool_reports_only_names_of_other_exporters(scraped: Scraped, program: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped.classic[program], text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, _LINT), done.stderr
    others = ("DCGM_", "node_", "paceline_rdma_counter_")  # the last is a gauge about counters
    faults = [line for line in done.stderr.splitlines() if not line.startswith(others)]
    # Paceline's GPU metrics have dcgm-exporter's labels too, so that the two can be joined.
    assert [fault for fault in faults if "label names should be written" not in fault] == []


@needs_promtool
def test_promtool_accepts_the_scrape_configuration() -> None:
    subprocess.run(
        ["promtool", "check", "config", DEPLOY / "prometheus.yml"], check=True, capture_output=True
    )


@needs_promtool
def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [*own_queries(), *DCGM_EXPORTER, *NODE_EXPORTER]
    rules = [
        {"record": f"query:{number}", "expr": substituted(query, 5)}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.json"  # JSON is valid YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert f"{len(queries)} rules found" in done.stdout, done.stderr


def test_grafana_accepts_the_dashboard() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(own_queries()) + "${datasource}"))
    assert used - {"__rate_interval", "__range"} <= variables
