"""docker-compose.yml without Docker: its commands run as processes on this machine.

PostgreSQL is real, but not from the image. Service names are replaced with 127.0.0.1, and ports
with free ones. Prometheus is not started: its configuration must name the served endpoints.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
TOKENS = "/var/lib/paceline/tokens"


def interpolate(text: str) -> str:
    """Return the text with ${NAME:-default} replaced as compose does if no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@dataclass
class Machine:
    """The directories and ports that replace the containers."""

    directory: Path
    database_url: str
    server_port: int = field(default_factory=free_port)
    agent_port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, service: str) -> list[str]:
        return [self.here(interpolate(word)) for word in SERVICES[service]["command"]]

    def here(self, word: str) -> str:
        for there, here in (
            ("http://server:8470", f"http://127.0.0.1:{self.server_port}"),
            (TOKENS, str(self.directory / "tokens")),
            ("8470", str(self.server_port)),
            ("9478", str(self.agent_port)),
        ):
            word = word.replace(there, here)
        return word

    def environment(self, service: str) -> dict[str, str]:
        given = SERVICES[service].get("environment", {})
        environment = {name: interpolate(value) for name, value in given.items()}
        if "PACELINE_SERVER_DATABASE_URL" in environment:
            environment["PACELINE_SERVER_DATABASE_URL"] = self.database_url
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = str(self.directory / "home")
        # The node's directories are volumes of the service; here the environment defines them.
        node = {
            "PACELINE_AGENT_NODE_DIRECTORY": str(self.directory / "node"),
            "PACELINE_AGENT_SPOOL_DIRECTORY": str(self.directory / "spool"),
        }
        return {"PATH": path, "HOME": home, **node, **environment}

    def start(self, service: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{service}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(service),
                env=self.environment(service),
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def log_of(self, service: str) -> str:
        return (self.directory / f"{service}.log").read_text()

    def get(self, path: str, token: str | None = None) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            return httpx.get(
                f"http://127.0.0.1:{self.server_port}{path}", headers=headers, timeout=60
            )
        except httpx.TransportError:
            return None

    def token(self, name: str) -> str:
        return (self.directory / "tokens" / name).read_text().strip()

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing XDG_RUNTIME_DIR
        pgserver = importlib.import_module("pgserver")
    # PostgreSQL's user must be able to enter it
    directory = tempfile.mkdtemp(prefix="paceline-compose-")
    cluster = pgserver.get_server(directory, cleanup_mode="stop")
    yield cluster.get_uri()
    cluster.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def machine(postgresql: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Start all services in the order of `depends_on`."""
    machine = Machine(tmp_path_factory.mktemp("compose"), postgresql)
    try:
        made = machine.start("tokens")
        assert made.wait(120) == 0, machine.log_of("tokens")
        server = machine.start("server")
        wait_for(
            lambda: server.poll() is not None or machine.get("/healthz"), "the server to answer"
        )
        assert server.poll() is None, machine.log_of("server")
        machine.start("agent")
        yield machine
    finally:
        machine.stop()


def nodes(machine: Machine) -> list[dict[str, Any]]:
    answer = machine.get("/api/v1/nodes", machine.token("operator"))
    assert answer is not None
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def test_the_server_is_healthy_and_rejects_requests_without_a_token(machine: Machine) -> None:
    health = machine.get("/healthz")
    assert health is not None
    assert health.text == "ok\n"
    wait_for(
        lambda: (answer := machine.get("/readyz")) is not None and answer.status_code == 200,
        "the server to be ready",
    )
    refused = machine.get("/api/v1/nodes")
    assert refused is not None
    assert refused.status_code == 401


def test_the_example_agent_appears_as_a_node(machine: Machine) -> None:
    [node] = wait_for(lambda: nodes(machine), "the agent to appear")
    assert node["id"] == "node-0"
    assert node["slots"] == 2
    assert node["state"] == "ready"


def test_every_scraped_endpoint_is_served(machine: Machine) -> None:
    ports = {"server:8470": machine.server_port, "agent:9478": machine.agent_port}
    for target in targets():
        url = f"http://127.0.0.1:{ports[target]}/metrics"
        body = wait_for(functools.partial(scraped, url), f"{target} to serve /metrics")
        assert "# TYPE paceline_" in body


def scraped(url: str) -> str | None:
    try:
        answer = httpx.get(url, timeout=60)
    except httpx.TransportError:
        return None
    return answer.text if answer.status_code == 200 else None


def targets() -> list[str]:
    return [
        target
        for job in PROMETHEUS["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]


def test_prometheus_scrapes_each_service_at_its_port() -> None:
    listening = {
        "server:" + option("server", "--port"),
        "agent:" + option("agent", "--metrics-port"),
    }
    assert set(targets()) == listening
    for service in ("server", "agent"):
        where = option(service, "--metrics-host" if service == "agent" else "--host")
        assert where == "0.0.0.0", f"{service} cannot be reached by the others"
    config = option("prometheus", "--config.file")
    assert f"./deploy/prometheus.yml:{config}:ro" in SERVICES["prometheus"]["volumes"]


def option(service: str, name: str) -> str:
    words = [part for word in SERVICES[service]["command"] for part in word.split("=", 1)]
    return str(words[words.index(name) + 1])


def test_creating_the_tokens_again_keeps_them(machine: Machine) -> None:
    names = ("agent", "operator")
    before = [machine.token(name) for name in names]
    assert machine.start("tokens").wait(120) == 0, machine.log_of("tokens")
    assert [machine.token(name) for name in names] == before
    config = (machine.directory / "tokens" / "agent.toml").read_text()
    assert tomllib.loads(config) == {"token": before[0]}


def test_lost_tokens_are_created_again(machine: Machine) -> None:
    before = machine.token("operator")
    (machine.directory / "tokens" / "operator").unlink()
    assert machine.start("tokens").wait(120) == 0, machine.log_of("tokens")
    assert machine.token("operator") != before
    wait_for(lambda: nodes(machine), "the new token to be accepted")


def test_every_reference_in_the_file_is_defined() -> None:
    volumes = {
        source
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if not (source := volume.split(":", 1)[0]).startswith((".", "/"))
    }
    assert volumes == set(COMPOSE["volumes"])
    depended = {name for service in SERVICES.values() for name in service.get("depends_on", {})}
    assert depended <= set(SERVICES)
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":", 1)[0]).exists(), volume


def test_the_image_contains_what_the_commands_need() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in packages["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert any(Path(package).is_relative_to(source) for source in sources), package
    assert "deploy" in sources
