"""The server as started by its command: a serving process and a worker process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from simulated_node import SimulatedNode, post_job, stop_all
from sqlalchemy import select

from paceline_server import background_process
from paceline_server.background_process import BackgroundProcess
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.models import LeaseRow


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/test.db"


@pytest.fixture
def process(run_process: Callable[..., Any], wait_for: Callable[..., Any]) -> Any:
    started = run_process("--port", "0")
    wait_for(lambda: is_ready(started), "the worker")
    return started


@pytest.fixture
def nodes(process: Any) -> Iterator[list[SimulatedNode]]:
    fleet = [SimulatedNode(f"node-{number}", process.url()) for number in range(2)]
    for node in fleet:
        node.start()
    yield fleet
    stop_all(fleet)


def is_ready(process: Any) -> bool:
    return httpx.get(f"{process.url()}/readyz", timeout=60.0).is_success


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def worker_of(process: Any) -> int:
    (worker,) = children_of(process.process.pid)
    return worker


def test_killed_worker_is_restarted_and_its_jobs_continue(
    process: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    job = f"{process.url()}/api/v1/jobs/{post_job(process.url())}"

    def step() -> int:
        return httpx.get(job, timeout=60.0).json()["step"] or 0

    wait_for(lambda: step() >= 3, "steps")
    os.kill(worker_of(process), signal.SIGKILL)
    wait_for(lambda: not is_ready(process), "the server to notice")
    wait_for(lambda: is_ready(process), "another worker")
    reached = step()
    wait_for(lambda: step() > reached + 3, "steps again")
    assert httpx.get(job, timeout=60.0).json()["generation"] == 1


def test_hung_worker_is_replaced(
    run_server: Callable[..., Any],
    database_url: str,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = run_server(role="api")
    background = BackgroundProcess(Settings(database_url=database_url), server.program.signals)
    others = set(children_of(os.getpid()))
    background.start()
    try:
        wait_for(lambda: background.unready() == [], "the worker")
        (first,) = set(children_of(os.getpid())) - others
        os.kill(first, signal.SIGSTOP)
        with monkeypatch.context() as hurried:
            hurried.setattr(background_process, "_HUNG_SECONDS", 2.0)
            wait_for(lambda: background.unready() == ["worker: not running"], "its end")
        wait_for(lambda: background.unready() == [], "another one")
        assert first not in children_of(os.getpid())
    finally:
        background.stop()


def test_worker_ends_when_the_server_is_killed(process: Any, wait_for: Callable[..., Any]) -> None:
    worker = Path(f"/proc/{worker_of(process)}")
    process.signal(signal.SIGKILL)
    wait_for(lambda: not worker.exists(), "the worker's end")


def test_server_releases_its_leases_at_shutdown(
    process: Any, nodes: list[SimulatedNode], database: Database, wait_for: Callable[..., Any]
) -> None:
    def leases() -> list[LeaseRow]:
        with database.read() as session:
            return list(session.scalars(select(LeaseRow)))

    post_job(process.url())
    wait_for(leases, "a lease")
    worker = Path(f"/proc/{worker_of(process)}")
    process.signal(signal.SIGTERM)
    process.process.wait(60)
    assert not worker.exists()
    assert {lease.expires_ns for lease in leases()} == {0}


def test_metrics_include_those_of_the_worker(
    process: Any, nodes: list[SimulatedNode], wait_for: Callable[..., Any]
) -> None:
    post_job(process.url())

    def value(name: str) -> float:
        """Return the value of this metric, which has one sample; 0 before it has any."""
        text = httpx.get(f"{process.url()}/metrics", timeout=60.0).text
        samples = [
            each for family in text_string_to_metric_families(text) for each in family.samples
        ]
        found = [sample.value for sample in samples if sample.name == name]
        assert len(found) <= 1
        return found[0] if found else 0.0

    wait_for(lambda: value("paceline_worker_leases") == 1.0, "the lease")
    assert value("paceline_worker_tick_seconds_count") > 0
    wait_for(lambda: value("paceline_streams") == 2.0, "the streams of both nodes")


def test_each_process_signals_its_commits_to_the_other(
    run_server: Callable[..., Any], database_url: str, wait_for: Callable[..., Any]
) -> None:
    """The worker polls once an hour here, so that only the signals make progress possible."""
    server = run_server(role="api")
    settings = Settings(database_url=database_url, tick_seconds=3600.0)
    background = BackgroundProcess(settings, server.program.signals)
    background.start()
    nodes = [SimulatedNode(f"node-{number}", server.url) for number in range(2)]
    try:
        wait_for(lambda: background.unready() == [], "the worker")
        for node in nodes:
            node.start()
        job = f"{server.url}/api/v1/jobs/{post_job(server.url)}"
        wait_for(lambda: (httpx.get(job, timeout=60.0).json()["step"] or 0) >= 3, "steps")
        assert server.program.signals.commands.count > 0
        changes = server.program.signals.changes
        previous = changes.count
        wait_for(lambda: changes.count > previous, "a change")
    finally:
        stop_all(nodes)
        background.stop()
