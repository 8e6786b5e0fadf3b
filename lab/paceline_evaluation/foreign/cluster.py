"""The cluster of the foreign arm: a server, and two nodes that are network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from paceline_cli.client import Client
from paceline_demo.cluster import (
    Cluster,
    EmulatedNode,
    free_port,
    processes_with,
    start_process,
)
from paceline_evaluation.foreign.network_nodes import NetworkNodes, why_unavailable
from paceline_evaluation.observed_job import SERVER_SECONDS

NODES = 2
TRAINERS = Path(__file__).with_name("trainers")
_END_SECONDS = 3.0


class ForeignCluster(Cluster):
    """A cluster on which commands start trainings that `paceline watch` records.

    Without the right to make network namespaces, both nodes are directories of this machine, as in
    the demo. `network` is None then, and before the cluster runs.
    """

    def __init__(self) -> None:
        super().__init__(NODES, 0)
        self._cleanup = ExitStack()
        self.network: NetworkNodes | None = None
        self.why_no_network = why_unavailable()
        self._launchers: list[subprocess.Popen[bytes]] = []

    @property
    def orders(self) -> Path:
        """The file with which faults are ordered."""
        return self.directory / "orders.json"

    @contextlib.contextmanager
    def running(self) -> Iterator[Client]:
        """Start server and agents; stop them at the end.

        Raises:
            click.ClickException: they do not start.
        """
        try:
            shutil.copytree(TRAINERS, self.directory / "trainers")
            if self.why_no_network is None:
                self._add_network()
            self.start()
            with Client(self.url, self.operator_token, SERVER_SECONDS) as client:
                yield client
        finally:
            self.close()
            self.remove_logs()

    def agent_command(self, node: EmulatedNode) -> list[str]:
        command = super().agent_command(node)
        if self.network is None:
            return command
        command[command.index("--address") + 1] = self.network.address(node.number)
        return [*self.network.inside(node.number), *command, "--allow-plain-http"]

    def start_training(self, job_id: str, ranks: int, script: str, *arguments: str) -> None:
        """Start a training with `paceline watch -- torchrun` on each node."""
        address = "127.0.0.1" if self.network is None else self.network.address(0)
        port = str(free_port(0))
        for node in self.nodes:
            inside = () if self.network is None else self.network.inside(node.number)
            command = [
                *(*inside, sys.executable, "-m", "paceline_cli", "watch", "--"),
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES)),
                *("--nproc-per-node", str(ranks // NODES), "--node-rank", str(node.number)),
                *("--master-addr", address, "--master-port", port),
                *(str(self.directory / "trainers" / script), *arguments),
            ]
            environment = {
                **self.environment(),
                "PACELINE_RING_DIRECTORY": str(node.directory / "rings"),
                "PACELINE_JOB": job_id,
                "ORDERS": str(self.orders),
            }
            self._launchers.append(start_process(command, self.log(job_id, node), environment))

    def log(self, job_id: str, node: EmulatedNode) -> Path:
        return self.directory / f"{job_id}.{node.number}.log"

    def has_ended(self) -> bool:
        """Return whether all launchers of the current training have ended."""
        return all(launcher.poll() is not None for launcher in self._launchers)

    def end_training(self, job_id: str) -> None:
        """End all processes of a training, also those that are stopped.

        Another evaluation on this machine may have a job of this name: its processes stay.
        """

        def remaining() -> set[int]:
            return {*processes_with("PACELINE_JOB", job_id)}.intersection(self.processes())

        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _END_SECONDS
            while (left := remaining()) and time.monotonic() < deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                for launcher in self._launchers:
                    launcher.poll()  # it remains in the table of processes otherwise
                time.sleep(0.2)
        for launcher in self._launchers:
            launcher.wait()
        self._launchers.clear()

    def close(self) -> int:
        orphans = super().close()
        self._cleanup.close()
        return orphans

    def _add_network(self) -> None:
        """Connect the nodes to each other and to the server."""
        self.network = NetworkNodes(NODES, self._cleanup)
        self.network.connect_to_server()
        self.use_network(self.network.server_address)

    def _gpu_library(self) -> Path | None:
        self.telemetry = "none"  # ranks compute on CPUs
        return None
