"""A server with a large job: delay of alerts, memory, and backlog.

The real server process on a real database, fed over HTTP by simulated agents of eight ranks each,
which send what real ones do: spans, state pages and samples, each node at its own times. Ranks
become slow and recover repeatedly. Each alert at the webhook has the step it is based on; its delay
counts from the acknowledgment of the last batch of that step.

The server is started by its command, with only the database's option; it shares the processors with
the simulated agents. A thousand agents send every 2.5 s, as the server requests of so many
(`api.routes.agents.flush_seconds`): a request costs a third of a millisecond of CPU or more,
whatever its content.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.fleet.connections import Connections
from benchmarks.fleet.load import Load
from benchmarks.fleet.nodes import Node
from benchmarks.fleet.plan import made
from benchmarks.harness import Result
from benchmarks.node.processes import RunningProcess
from paceline_wire.local_token import find_token
from paceline_wire.topology import Topology

ALERT_GOAL_SECONDS = 2.0
LAG_GOAL_SECONDS = 5.0  # one step of the larger job
GROWTH_GOAL_MIB = 64.0
CPU_GOAL_RATIO = (
    0.4  # share of the step time: on two cores this leaves room for work that is not per step
)

LOADS = (
    Load("1,024 ranks", Topology(32, 4, 8), 12, 1.0, 60, 0.5, 16, 12),
    Load("10,240 ranks", Topology(160, 8, 8), 12, 5.0, 12, 2.5, 4, 6),
)


def measure() -> Iterator[Result]:
    for load in LOADS:
        with tempfile.TemporaryDirectory() as scratch:
            run = _run(load, Path(scratch))
        print(run.reported(), file=sys.stderr)
        yield from run.results()


@dataclass
class Run:
    load: Load
    alerts: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    acknowledged: dict[int, float] = field(default_factory=dict)
    memory_mib: list[float] = field(default_factory=list)  # one per second
    lag_seconds: list[float] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    refused: int = 0
    latest: float = 0.0
    cpu_seconds: float = 0.0
    feeding_seconds: float = 0.0  # CPU seconds
    seconds: float = 0.0
    spans: int = 0
    steps_known: int | None = None

    @property
    def delays(self) -> list[float]:
        return [
            at - self.acknowledged[alert["incident"]["finding"]["step"]]
            for at, alert in self.alerts
            if alert["event"] != "resolved"
            and alert["incident"]["finding"].get("step") in self.acknowledged
        ]

    @property
    def growth_mib(self) -> float:
        """Return the growth of the second half over the end of the first."""
        half = len(self.memory_mib) // 2
        return max(self.memory_mib[half:]) - max(self.memory_mib[:half])

    def results(self) -> Iterator[Result]:
        # Without any alert, the delay is at least the whole run.
        name, delays = self.load.name, self.delays or [self.seconds]
        yield Result(f"{name}: finding to alert, p50", float(np.percentile(delays, 50)), "s")
        p99 = float(np.percentile(delays, 99))
        yield Result(f"{name}: finding to alert, p99", p99, "s", goal=ALERT_GOAL_SECONDS)
        lag = float(np.percentile(self.lag_seconds, 99))
        yield Result(f"{name}: unread log, p99", lag, "s", goal=LAG_GOAL_SECONDS)
        known = 0 if self.steps_known is None else self.steps_known + 1
        missing = max(0, self.load.steps - known)
        yield Result(f"{name}: steps that the server has not finished", missing, "", goal=0)
        yield Result(f"{name}: batches sent late, at most", self.latest, "s")
        yield Result(f"{name}: memory, peak", max(self.memory_mib), "MiB")
        yield Result(f"{name}: memory, growth", self.growth_mib, "MiB", goal=GROWTH_GOAL_MIB)
        cores = self.cpu_seconds / self.seconds
        yield Result(f"{name}: server's CPU", cores, "cores", goal=2.0)
        each = self.cpu_seconds / self.load.steps
        goal = CPU_GOAL_RATIO * self.load.step_seconds
        yield Result(f"{name}: server's CPU per step", each, "s", goal=goal)
        yield Result(f"{name}: spans", self.spans / self.cpu_seconds, "spans/CPU s")

    def reported(self) -> str:
        requests = np.percentile(self.request_seconds or [0.0], (50, 99))
        return (
            f"{self.load.name}: {len(self.alerts)} alerts, {len(self.delays)} timed, request p50"
            f" {requests[0] * 1e3:.0f} ms p99 {requests[1] * 1e3:.0f} ms, {self.refused} refused,"
            f" sent up to {self.latest:.2f} s late, steps up to {self.steps_known}"
            f" of {self.load.steps} known, feeding took"
            f" {self.feeding_seconds / self.load.steps:.2f} CPU s per step"
        )


def _run(load: Load, scratch: Path) -> Run:
    run = Run(load)
    with _Webhook(run) as webhook, _Server(scratch, webhook.url) as server:
        asyncio.run(_play(load, run, server, scratch))
        run.steps_known = server.get(f"/api/v1/jobs/{server.job}")["step"]
    return run


async def _play(load: Load, run: Run, server: _Server, scratch: Path) -> None:
    nodes = [Node(number) for number in range(load.nodes)]
    connections = Connections(server.url)
    await asyncio.gather(
        *(connections.send(n, n.batch(0, time.time(), events=[n.hello()])) for n in nodes)
    )
    await asyncio.gather(*(connections.listen(node) for node in nodes))
    server.create_job(load)
    planned = asyncio.Event()
    beating = asyncio.create_task(_beat(connections, nodes, planned))
    generation = await asyncio.to_thread(server.placed, load)
    plan = await asyncio.to_thread(made, load, server.job, generation, scratch)
    await asyncio.sleep(plan.begins - time.time() - 2.0)
    planned.set()
    await beating
    watching = asyncio.create_task(_watch(run, server))
    began, cpu, own = time.time(), server.cpu_seconds(), time.process_time()
    await asyncio.gather(*(connections.follow(node, plan.of(node.number)) for node in nodes))
    await asyncio.sleep(3.0)  # the last alerts
    run.seconds, run.cpu_seconds = time.time() - began, server.cpu_seconds() - cpu
    run.feeding_seconds = time.process_time() - own
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    connections.close()
    run.spans, run.acknowledged = plan.spans, connections.acknowledged
    run.request_seconds, run.refused = connections.seconds, connections.refused
    run.latest = connections.latest


async def _beat(connections: Connections, nodes: list[Node], planned: asyncio.Event) -> None:
    """Send heartbeats while the plan is prepared, so that the nodes count as alive."""
    while not planned.is_set():
        for node in nodes:
            node.beats += 1
        await asyncio.gather(
            *(
                connections.send(
                    node,
                    node.batch(node.beats, time.time(), events=connections.take_results(node)),
                )
                for node in nodes
            )
        )
        await asyncio.sleep(1.0)


async def _watch(run: Run, server: _Server) -> None:
    while True:
        run.memory_mib.append(server.memory_mib())
        run.lag_seconds.append(await asyncio.to_thread(server.lag_seconds))
        await asyncio.sleep(1.0)


class _Webhook:
    """Records the time of each alert."""

    def __init__(self, run: Run) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                at = time.time()
                body = self.rfile.read(int(self.headers["Content-Length"]))
                run.alerts.append((at, json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> _Webhook:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server:
    """A running `paceline server` with both of its processes."""

    def __init__(self, scratch: Path, webhook: str) -> None:
        self._text = scratch / "output"
        command = [sys.executable, "-m", "paceline_server", "server", "--port", "0"]
        with self._text.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--database-url", f"sqlite:///{scratch / 'server.db'}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PACELINE_SERVER_WEBHOOK_URL": webhook,
                    "PACELINE_SERVER_ALLOW_LOCAL_RECEIVERS": "true",
                },
            )
        self.job = ""

    def __enter__(self) -> _Server:
        sign = "Listening on "
        self._await("listens", lambda: sign in self._text.read_text())
        self.url = self._text.read_text().partition(sign)[2].partition("\n")[0]
        token = find_token(self.url, "operator", os.environ)
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=60.0)
        self._await("is ready", lambda: self._client.get("/readyz").is_success)
        self._pids = [each.pid for each in RunningProcess(self._process.pid).family().members]
        return self

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"no server that {what}: {self._text.read_text()}")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        print("\n".join(self._text.read_text().splitlines()[1:][-20:]), file=sys.stderr)

    def get(self, path: str) -> Any:
        answer = self._client.get(path)
        answer.raise_for_status()
        return answer.json()

    def create_job(self, load: Load) -> None:
        topology = load.topology
        body = {
            "name": "scale",
            "argv": ["true"],
            "topology": {"dp": topology.dp, "pp": topology.pp, "tp": topology.tp},
            "mode": "observe",
            "metadata": {"schedule": "gpipe", "microbatches": str(load.microbatches)},
        }
        answer = self._client.post("/api/v1/jobs", json=body)
        answer.raise_for_status()
        self.job = answer.json()["id"]

    def placed(self, load: Load) -> int:
        """Block until all ranks are placed. Return the generation."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            job = self.get(f"/api/v1/jobs/{self.job}")
            if job["state"] == "starting":
                asked = {"dp": load.topology.dp, "pp": load.topology.pp, "tp": load.topology.tp}
                if job["topology"] != asked:
                    raise RuntimeError(f"placed as {job['topology']}")
                return int(job["generation"])
            time.sleep(0.1)
        raise RuntimeError(f"the job was not placed: {job}")

    def memory_mib(self) -> float:
        return sum(map(_memory_mib, self._pids))

    def cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, self._pids))

    def lag_seconds(self) -> float:
        for line in self._client.get("/metrics").text.splitlines():
            if line.startswith("paceline_worker_lag_seconds"):
                return float(line.split()[1])
        raise RuntimeError("the server tells no lag")


def _memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
