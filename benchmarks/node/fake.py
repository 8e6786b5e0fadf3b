"""Eight emulated GPUs, and the nine HCAs of a real H100 node as a frozen sysfs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.node.processes import RunningProcess
from paceline_demo.fake_nvml import FakeGpus, build, environment

GPUS = 8
_TREE = Path(__file__).parents[2] / "tests/agent/fixtures/infiniband-h100.tar.gz"
_STOP_SECONDS = 20


class FakeNode:
    """A directory with all that an agent needs; leaving the context ends its processes."""

    def __init__(self, gpus: int = GPUS) -> None:
        self._gpus = gpus
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeNode:
        scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-node-"))
        self.directory = Path(scratch)
        self.sysfs = self.directory / "sys"
        (self.sysfs / "class").mkdir(parents=True)
        subprocess.run(["tar", "-xf", _TREE, "-C", self.sysfs / "class"], check=True)
        _add_network(self.sysfs / "class" / "net" / "bond0")
        self.gpus = fake = FakeGpus.create(self.directory / "gpus", self._gpus)
        self._stack.callback(fake.close)
        self.environment = os.environ | environment(build(self.directory), fake.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def agent(self, url: str, *options: str) -> Iterator[RunningProcess]:
        """Start the real agent with its command."""
        command = [sys.executable, "-m", "paceline_agent", *self.agent_options(url), *options]
        with self.running("agent", command, self.environment) as process:
            yield process

    def agent_options(self, url: str) -> list[str]:
        return [
            *("--server", url, "--agent-id", "bench", "--metrics-port", str(free_port())),
            *("--node-directory", str(self.directory / "node")),
            *("--sysfs-root", str(self.sysfs), "--log-level", "warning"),
        ]

    @contextlib.contextmanager
    def running(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] = os.environ
    ) -> Iterator[RunningProcess]:
        """Start another process; its output goes to a file, which is shown if it fails."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(variables))
        try:
            yield RunningProcess(process.pid)
            if process.poll():
                raise RuntimeError(f"{name} ended by itself: {log.read_text()[-400:]}")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _add_network(directory: Path) -> None:
    """Add an interface with 2 x 100 Gbit/s and jumbo frames."""
    (directory / "statistics").mkdir(parents=True)
    attributes = {
        "operstate": "up",
        "speed": "200000",
        "mtu": "9000",
        "carrier": "1",
        "duplex": "full",
    }
    counted = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors")
    attributes |= {f"statistics/{name}": "123456789" for name in counted}
    for name, text in attributes.items():
        (directory / name).write_text(f"{text}\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
