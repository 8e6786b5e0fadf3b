"""The cost of a large job to the server: CPU per step, memory and disk, whatever else the machine
runs.

The server's log writer and worker on a real database, in one process, receive what a fleet sends.
The clock is the plan's, not the machine's, so that a busy machine only makes the run longer. HTTP
and the sending of alerts are not included; `scale` measures them.

CPU seconds are also longer on a busy machine (caches, hyper-threads). So each load also reports the
CPU time of a fixed piece of work in the same period.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

from benchmarks.fleet.load import Load
from benchmarks.fleet.nodes import Node
from benchmarks.fleet.plan import Plan, made
from benchmarks.harness import Result
from paceline_server.decide.types import JobSpec
from paceline_server.ingest.check import check
from paceline_server.ingest.writer import LogWriter, Status
from paceline_server.interpreter import tune_interpreter
from paceline_server.metrics import BackgroundMetrics, ServingMetrics
from paceline_server.policy import Policy
from paceline_server.settings import Settings
from paceline_server.steps.types import Ledger
from paceline_server.store.database import Database
from paceline_server.store.log import newest_log_id
from paceline_server.store.models import HotLogRow, IncidentRow, JobRow
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.commit import AlertTargets
from paceline_server.worker.tick import TickSettings
from paceline_server.worker.worker import Worker
from paceline_wire.batch import decode, encode
from paceline_wire.topology import Topology

LOADS = (
    Load("1,024 ranks", Topology(32, 4, 8), 12, 1.0, 60, 0.5, 16, 12),
    Load("10,240 ranks", Topology(160, 8, 8), 12, 5.0, 10, 2.5, 4, 6),
)
CPU_GOAL_RATIO = 0.3  # share of the step time, on two cores
GROWTH_GOAL_MIB = 64.0
LOG_BYTES = 32 << 20  # kept, so that a short run reaches it
# The log is trimmed every 10 s and grows by what arrives in between.
LOG_GOAL_MIB = 32.0 + 24.0
_WARM_UP_STEPS = 2  # the first steps fill the windows
_TICKS_PER_SECOND = 2  # as often as the worker ticks when a tick takes a quarter of a second
_TRANSACTIONS_PER_TICK = 10  # that store the batches between two ticks
_JOB = "job-scale"


@dataclass
class Costs:
    """Costs per step, once the step is over."""

    load: Load
    ingest_seconds: list[float] = field(default_factory=list)  # CPU seconds
    worker_seconds: list[float] = field(default_factory=list)
    fixed_seconds: list[float] = field(default_factory=list)  # duration of the fixed piece of work
    memory_mib: list[float] = field(default_factory=list)
    log_mib: list[float] = field(default_factory=list)
    file_mib: list[float] = field(default_factory=list)
    steps_known: int = 0
    incidents: int = 0

    def results(self) -> Iterator[Result]:
        name = f"server, {self.load.name}"
        ingest = fmean(self.ingest_seconds[_WARM_UP_STEPS:])
        worker = fmean(self.worker_seconds[_WARM_UP_STEPS:])
        goal = CPU_GOAL_RATIO * self.load.step_seconds
        yield Result(f"{name}: CPU per step", ingest + worker, "s", goal=goal)
        yield Result(f"{name}: of that, storing batches", ingest, "s")
        yield Result(f"{name}: of that, the worker", worker, "s")
        fixed = fmean(self.fixed_seconds[_WARM_UP_STEPS:])
        yield Result(f"{name}: a fixed piece of work meanwhile", fixed, "s")
        half = len(self.memory_mib) // 2
        growth = max(self.memory_mib[half:]) - max(self.memory_mib[:half])
        yield Result(f"{name}: memory", max(self.memory_mib), "MiB")
        yield Result(f"{name}: memory, second half over first", growth, "MiB", goal=GROWTH_GOAL_MIB)
        yield Result(f"{name}: hot log", max(self.log_mib), "MiB", goal=LOG_GOAL_MIB)
        yield Result(f"{name}: database file", max(self.file_mib), "MiB")
        yield Result(
            f"{name}: steps known",
            self.steps_known,
            "steps",
            goal=self.load.steps - 1,
            more_is_better=True,
        )
        yield Result(f"{name}: incidents", self.incidents, "incidents")


def measure() -> Iterator[Result]:
    for load in LOADS:
        with tempfile.TemporaryDirectory() as scratch:
            yield from run(load, Path(scratch)).results()


class Server:
    """The server's parts between HTTP and the database, with a manual clock."""

    def __init__(self, scratch: Path) -> None:
        self.now_ns = time.time_ns()
        self.scratch = scratch
        self.database = Database(f"sqlite:///{scratch / 'server.db'}")
        self.database.migrate()
        signals, registry = CommitSignals(), CollectorRegistry()
        settings = Settings(log_retention_bytes=LOG_BYTES)
        tick_settings = TickSettings(
            lease_ns=int(settings.lease_seconds * 1e9),
            batches=settings.batches_per_tick,
            batch_bytes=settings.bytes_per_tick,
            alert_targets=AlertTargets((), ()),
        )
        self._log = LogWriter(self.database, signals, ServingMetrics(registry))
        self._log.start()
        self.worker = Worker(
            self.database,
            signals,
            BackgroundMetrics(registry),
            "owner",
            tick_settings,
            settings,
            Policy(),
            lambda: self.now_ns,
        )

    def take(self, payload: bytes) -> Future[Status]:
        batch = decode(payload)
        check(batch)
        return self._log.submit(batch, payload, self.now_ns)

    def create_job(self, load: Load) -> int:
        """Create the job. Return the generation in which it was placed."""
        topology = load.topology
        metadata = {"schedule": "gpipe", "microbatches": str(load.microbatches)}
        with self.database.write() as session:
            job = JobRow(
                id=_JOB,
                name="scale",
                spec=JobSpec(name="scale", argv=["true"], topology=topology, metadata=metadata),
                policy=Policy(mode="observe"),
                state="pending",
                generation=0,
                topology=topology,
                created_ns=self.now_ns,
                stop_requested=False,
                cursor=newest_log_id(session),
                ledger=Ledger(),
            )
            session.add(job)
        self.worker.run_pass()
        with self.database.read() as session:
            job = session.get_one(JobRow, _JOB)
        if job.state != "starting":
            raise RuntimeError(f"the job was not placed: {job.state}")
        return job.generation

    def close(self) -> None:
        self._log.stop()
        self.database.close()


def run(load: Load, scratch: Path) -> Costs:
    server, costs = Server(scratch), Costs(load)
    tune_interpreter()
    try:
        at = server.now_ns / 1e9
        nodes = [Node(number) for number in range(load.nodes)]
        hellos = [encode(node.content(0, at, events=[node.hello()])) for node in nodes]
        for stored in [server.take(hello) for hello in hellos]:
            stored.result()
        generation = server.create_job(load)
        _play(server, made(load, _JOB, generation, scratch, at + 1.0), costs)
    finally:
        server.close()
    return costs


def _play(server: Server, plan: Plan, costs: Costs) -> None:
    gap_ns = 1_000_000_000 // _TICKS_PER_SECOND // _TRANSACTIONS_PER_TICK
    step_ns = int(costs.load.step_seconds * 1e9)
    began_ns, groups = server.now_ns, 0
    used = {"ingest": 0.0, "worker": 0.0}
    waiting: list[Future[Status]] = []
    for planned in plan.all():
        began = time.process_time()
        while server.now_ns + gap_ns < int(planned.due * 1e9):
            server.now_ns += gap_ns
            for stored in waiting:
                stored.result()
            waiting.clear()
            used["ingest"] += time.process_time() - began
            began = time.process_time()
            groups += 1
            if groups % _TRANSACTIONS_PER_TICK == 0:
                server.worker.run_pass()
                used["worker"] += time.process_time() - began
            if server.now_ns - began_ns >= step_ns * (len(costs.worker_seconds) + 1):
                _note(server, costs, used)
            began = time.process_time()
        waiting.append(server.take(planned.payload))
        used["ingest"] += time.process_time() - began


def _note(server: Server, costs: Costs, used: dict[str, float]) -> None:
    costs.ingest_seconds.append(used["ingest"])
    costs.worker_seconds.append(used["worker"])
    used.update(ingest=0.0, worker=0.0)
    costs.fixed_seconds.append(_fixed_work())
    status = Path("/proc/self/status").read_text()
    costs.memory_mib.append(int(status.split("VmRSS:")[1].split()[0]) / 1024)
    files = server.scratch.glob("server.db*")
    costs.file_mib.append(sum(file.stat().st_size for file in files) / (1 << 20))
    with server.database.read() as session:
        size = session.scalar(select(func.sum(HotLogRow.size_bytes))) or 0
        costs.log_mib.append(size / (1 << 20))
        step = session.get_one(JobRow, _JOB).step
        costs.steps_known = 0 if step is None else step + 1
        costs.incidents = session.scalar(select(func.count()).select_from(IncidentRow)) or 0
    print(
        f"{costs.load.name}: {costs.steps_known} steps, CPU s: ingest"
        f" {costs.ingest_seconds[-1]:.2f} worker {costs.worker_seconds[-1]:.2f} fixed"
        f" {costs.fixed_seconds[-1]:.3f}; MiB: memory {costs.memory_mib[-1]:.0f}"
        f" log {costs.log_mib[-1]:.0f} file {costs.file_mib[-1]:.0f}",
        file=sys.stderr,
        flush=True,
    )


def _fixed_work() -> float:
    """Return CPU seconds of a fixed mix of numpy and plain Python."""
    numbers = np.random.default_rng(0).integers(0, 1 << 60, 400_000)
    known = {number: (number, float(number)) for number in range(30_000)}
    began = time.thread_time()
    for _ in range(2):
        np.cumsum(numbers[np.argsort(numbers, kind="stable")])
    for _ in range(10):
        total = 0
        for number, value in known.values():
            if number in known and value >= 0:
                total += number
    return time.thread_time() - began
