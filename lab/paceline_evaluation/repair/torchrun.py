"""The same trainings and faults under torchrun, for comparison.

Two nodes train, and a third waits as a spare, as torchrun permits (`--nnodes 2`). The rendezvous
store is on neither of them. The script is the same, with the same checkpoints on disk and without
copies in memory. A job that does not train again in time is ended and started again by hand.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import click

from paceline_demo.cluster import MARK, free_port, processes_with, start_process
from paceline_demo.faults import descendants
from paceline_evaluation.foreign.network_nodes import NetworkNodes
from paceline_evaluation.repair.cluster import wait_until, why_missing
from paceline_evaluation.repair.schedule import PlannedTrial, groups
from paceline_evaluation.repair.trainings import (
    LOCAL_RANKS,
    WORLD,
    StepLog,
    Training,
    plain_environment,
)
from paceline_evaluation.repair.trial import (
    NOT_PLAYED,
    OUTCOME_SECONDS,
    STEADY_STEPS,
    TrialResult,
    judge_recovery,
    send_order,
)

NODES = 3  # two that train, and a spare
_START_SECONDS = 120.0
_NEW_STEPS = 5
_STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
time.sleep(1e9)
"""


@dataclass
class TorchrunJob:
    """A training under torchrun, in namespaces of its own if this machine permits them."""

    training: Training
    directory: Path
    network: NetworkNodes | None
    chance: random.Random = field(default_factory=random.Random)
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by node

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.directory.mkdir(parents=True)
        self.checkpoints = self.directory / "checkpoints"
        self.checkpoints.mkdir()
        self.log = StepLog(self.directory)
        self._store: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> None:
        host = "127.0.0.1" if self.network is None else self.network.server_address
        self._port = free_port(0)
        command = [sys.executable, "-c", _STORE, host, str(self._port)]
        self._store = start_process(command, self.directory / "store.log", self._environment())
        self._endpoint = f"{host}:{self._port}"
        for node in range(NODES):
            self.start_launcher(node)

    def start_launcher(self, node: int) -> None:
        """Start the torchrun of a node, also again after the node was lost."""
        inside: tuple[str, ...] = ()
        address = "127.0.0.1"
        if self.network is not None:
            inside, address = self.network.inside(node), self.network.address(node)
        command = [
            *(*inside, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(WORLD // LOCAL_RANKS), "--nproc-per-node", str(LOCAL_RANKS)),
            *("--max-restarts", "1000", "--local-addr", address),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint),
            *("--rdzv-id", self.mark, "--rdzv-conf", "is_host=0"),
            *self.training.command()[1:],
        ]
        log = self.directory / f"launcher.{node}.log"
        self.launchers[node] = start_process(command, log, self._environment())

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if self.network is None else "eth0",
            # With the launchers' store, new ranks would read the addresses of dead ones.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **plain_environment(self.training, self.checkpoints, self.directory),
        }

    def node_of(self, pid: int) -> int | None:
        """Return the node on which a rank's process runs."""
        for node, launcher in self.launchers.items():
            if pid in descendants(launcher.pid):
                return node
        return None

    def is_steady(self) -> bool:
        """Return whether all ranks have trained for a while and saved."""
        first = self.log.first_common(self.log.pids())
        if first is None or self.log.newest() < first.completed + STEADY_STEPS:
            return False
        saved = self.training.committed(self.checkpoints)
        return bool(saved) and saved[-1][0] > first.completed

    def make_steady(self) -> bool:
        """Wait until the next fault can be injected; start the job if it does not run."""
        if not self.launchers:
            self.start()
        if wait_until(self.is_steady, _START_SECONDS):
            return True
        self.end()
        return False

    def end(self) -> None:
        """End all processes of the job."""
        deadline = time.monotonic() + 10.0
        while (left := processes_with(MARK, self.mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in [*self.launchers.values(), *filter(None, [self._store])]:
                process.poll()
            time.sleep(0.1)
        self.launchers.clear()


Inject = Callable[[TorchrunJob], Callable[[], None]]  # returns what heals the fault


def _nothing() -> None:
    return


def _signaled_ranks(number_of_ranks: int, number: signal.Signals = signal.SIGKILL) -> Inject:
    def inject(job: TorchrunJob) -> Callable[[], None]:
        pids = job.log.pids()
        for rank in job.chance.sample(range(WORLD), number_of_ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], number)
        return _nothing

    return inject


def _ordered(kind: str, **order: int) -> Inject:
    def inject(job: TorchrunJob) -> Callable[[], None]:
        send_order(job.directory, job.chance.randrange(WORLD), kind=kind, **order)
        return _nothing

    return inject


def _some_node(job: TorchrunJob) -> int:
    found = map(job.node_of, job.log.pids().values())
    nodes = sorted({node for node in found if node is not None})
    if not nodes:
        raise click.ClickException("no rank runs")
    return job.chance.choice(nodes)


def _node_lost(job: TorchrunJob) -> Callable[[], None]:
    node = _some_node(job)
    launcher = job.launchers[node]
    for pid in [*descendants(launcher.pid), launcher.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    return lambda: job.start_launcher(node)


def _launcher_killed(job: TorchrunJob) -> Callable[[], None]:
    node = _some_node(job)
    job.launchers[node].kill()
    job.launchers[node].wait()
    return lambda: job.start_launcher(node)


def _cut_off(seconds: float) -> Inject:
    def inject(job: TorchrunJob) -> Callable[[], None]:
        node = _some_node(job)
        assert job.network is not None
        job.network.cut(node)
        time.sleep(seconds)
        job.network.restore(node)
        return _nothing

    return inject


FAULTS: dict[str, Inject] = {  # by the name of the fault of the arm
    "rank killed": _signaled_ranks(1),
    "rank gets SIGTERM": _signaled_ranks(1, signal.SIGTERM),
    "rank gets SIGSEGV": _signaled_ranks(1, signal.SIGSEGV),
    "rank stopped": _signaled_ranks(1, signal.SIGSTOP),
    "rank exits 0": _ordered("exit", status=0),
    "rank exits 3": _ordered("exit", status=3),
    "rank raises an exception": _ordered("exception"),
    "rank runs out of GPU memory": _ordered("out-of-device-memory"),
    "two ranks killed": _signaled_ranks(2),
    "all ranks killed": _signaled_ranks(WORLD),
    "node lost": _node_lost,
    "node without network for 2 s": _cut_off(2.0),
    "node without network for 20 s": _cut_off(20.0),
    "guard killed": _launcher_killed,
}


@contextlib.contextmanager
def jobs() -> Iterator[Callable[[Training], TorchrunJob]]:
    """Yield a function that makes a job; all processes and files are removed at the end."""
    with ExitStack() as cleanup:
        directory = Path(tempfile.mkdtemp(prefix="paceline-torchrun-"))
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        network = None
        if why_missing("network") is None:
            network = NetworkNodes(NODES, cleanup)
            network.connect_to_server()
        numbers = count()

        def make(training: Training) -> TorchrunJob:
            job = TorchrunJob(training, directory / str(next(numbers)), network)
            cleanup.callback(job.end)
            return job

        yield make


def play_all(
    trials: Sequence[PlannedTrial],
    report: Callable[[int, str], None],
    results: list[TrialResult],
    most: int = 1000,
) -> None:
    """Play the faults of these trials under torchrun. Add to the results; call `report`."""
    with jobs() as make:
        for group in groups(trials, most):
            job = make(group[0].training)
            for trial in group:
                results.append(_play(trial, job))
                report(1, "")
            job.end()


def _play(trial: PlannedTrial, job: TorchrunJob) -> TrialResult:
    plan = trial.plan
    result = TrialResult(
        plan.kind,
        plan.name,
        job.training.name,
        launcher="torchrun",
        number=trial.number,
        required=plan.outcome,
    )
    job.chance = random.Random(trial.seed)
    if not job.make_steady():
        result.outcome = f"{NOT_PLAYED}: the job did not train"
        return result
    time.sleep(job.chance.uniform(0.0, 2.0))
    pids, newest = job.log.pids(), job.log.newest()
    committed = job.training.committed(job.checkpoints)
    injected = time.monotonic()
    try:
        heal = FAULTS[plan.name](job)
    except click.ClickException as error:
        result.outcome = f"{NOT_PLAYED}: {error.message}"
        job.end()
        return result

    def is_reached() -> bool:
        now = job.log.pids()
        if all(now[rank] != pids[rank] for rank in pids):
            result.outcome = "recovered"
            return all(len(steps) >= _NEW_STEPS for steps in job.log.of_process(now))
        result.outcome = "left alone"
        return plan.outcome == "either" and job.log.newest() >= newest + 100

    if wait_until(is_reached, OUTCOME_SECONDS):
        result.is_right = True
        result.restarts = len(job.log.processes(0, injected))
        if result.outcome == "recovered":
            judge_recovery(result, job.log, pids, newest, injected, committed)
            result.restarts -= pids[0] in job.log.processes(0, injected)
            result.duplicates = max(0, result.restarts - 1)
        else:
            result.seconds = job.log.longest_pause(injected, time.monotonic())
        heal()
    else:
        result.outcome = f"not recovered in {OUTCOME_SECONDS:.0f} s"
        job.end()
    if result.seconds is not None:
        result.seconds = round(result.seconds, 2)
    return result
