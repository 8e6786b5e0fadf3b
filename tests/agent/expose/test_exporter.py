"""The agent's /metrics, as Prometheus reads it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from paceline_agent.collect.contract import Collected
from paceline_agent.expose.exporter import CONNECTIONS_AT_MOST, Exporter, OwnMetric
from paceline_wire.batch import Sample


def brought(*samples: Sample, collector: str = "made") -> Collected:
    return Collected(samples=list(samples), collector=collector)


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value, 1)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter([OwnMetric("paceline_agent_spool_bytes", lambda: 17)])
    yield made
    made.close()


Fetch = Callable[..., httpx.Response]


@pytest.fixture
def fetch(exporter: Exporter) -> Fetch:
    port = exporter.start("127.0.0.1", 0)

    def get(accept: str = "text/plain") -> httpx.Response:
        url = f"http://127.0.0.1:{port}/metrics"
        return httpx.get(url, headers={"accept": accept}, trust_env=False, timeout=60)

    return get


@pytest.fixture
def scrape(fetch: Fetch) -> Callable[[], dict[tuple[str, str], float]]:
    def read() -> dict[tuple[str, str], float]:
        return {
            (one.name, one.labels.get("gpu", "")): one.value
            for family in text_string_to_metric_families(fetch().text)
            for one in family.samples
        }

    return read


def test_samples_keep_the_names_that_dashboards_know(
    exporter: Exporter, scrape: Callable[[], dict[tuple[str, str], float]]
) -> None:
    exporter.put(brought(sample("DCGM_FI_DEV_SM_CLOCK", 345.0, gpu="0")))
    exporter.put(
        brought(
            sample("DCGM_FI_DEV_SM_CLOCK", 1980.0, gpu="0"),
            sample("DCGM_FI_DEV_SM_CLOCK", 1975.0, gpu="1"),
        )
    )
    waiting = sample("node_pressure_cpu_waiting_seconds_total", 4.5)
    exporter.put(brought(waiting, collector="host"))
    found = scrape()
    assert found["DCGM_FI_DEV_SM_CLOCK", "0"] == 1980.0
    assert found["DCGM_FI_DEV_SM_CLOCK", "1"] == 1975.0
    assert found["node_pressure_cpu_waiting_seconds_total", ""] == 4.5
    assert found["paceline_agent_spool_bytes", ""] == 17


def test_what_a_collector_no_longer_brings_is_gone_and_not_frozen(
    exporter: Exporter, scrape: Callable[[], dict[tuple[str, str], float]]
) -> None:
    exporter.put(brought(sample("old", 1.0)))
    exporter.put(brought(sample("other", 1.0), collector="other"))
    exporter.put(brought(sample("new", 1.0)))
    found = scrape()
    assert ("old", "") not in found
    assert {("new", ""), ("other", "")} <= found.keys()


def test_lasting_values_are_shown_until_they_are_replaced(
    exporter: Exporter, scrape: Callable[[], dict[tuple[str, str], float]]
) -> None:
    exporter.put(Collected(lasting=[sample("width_max", 16.0)], collector="made"))
    exporter.put(brought(sample("width", 8.0)))
    assert scrape()["width_max", ""] == 16.0
    exporter.put(Collected(lasting=[], collector="made"))
    assert ("width_max", "") not in scrape()


def test_a_series_that_is_written_twice_does_not_spoil_the_scrape(
    exporter: Exporter, scrape: Callable[[], dict[tuple[str, str], float]], fetch: Fetch
) -> None:
    exporter.put(brought(sample("twice", 1.0, gpu="0"), sample("twice", 2.0, gpu="0")))
    assert scrape()["twice", "0"] == 2.0
    assert fetch().text.count("twice{") == 1


def test_openmetrics_is_for_those_who_ask(exporter: Exporter, fetch: Fetch) -> None:
    exporter.put(brought(sample("node_disk_read_bytes_total", 7.0, device="sda")))
    answer = fetch("application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics(answer.text)}
    assert families["node_disk_read_bytes"].type == "counter"
    assert families["node_disk_read_bytes"].unit == "bytes"


def test_a_port_in_use_is_reported_and_survived(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert exporter.start("127.0.0.1", taken.getsockname()[1]) is None
    assert "no /metrics" in caplog.text


def test_silent_connections_use_up_neither_threads_nor_the_port(exporter: Exporter) -> None:
    port = exporter.start("127.0.0.1", 0)
    assert port is not None
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(3 * CONNECTIONS_AT_MOST):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        url = f"http://127.0.0.1:{port}/metrics"
        assert httpx.get(url, trust_env=False, timeout=60).status_code == 200
        assert threading.active_count() - before <= CONNECTIONS_AT_MOST + 1
