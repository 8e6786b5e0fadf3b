"""The cluster of the campaign: like the demo's, but on PostgreSQL, with nodes that can be cut off.

Each node may have its own network namespace, connected to the server's by a bridge.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline_demo.cluster import Cluster, EmulatedNode
from paceline_demo.faults import descendants

NODES = 4  # a job of two nodes, and two spares
_FAKE_CLOCK = Path(__file__).with_name("fake_clock.c")
_NETWORK = "10.77.0"
_SERVER = f"{_NETWORK}.254"
_BRIDGE = "paceline-br"


class PostgreSQL:
    """A PostgreSQL server whose processes can be killed, stopped and started again."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-pg-"))
        self._server: Any = None
        self.start()
        self.url: str = self._server.get_uri()

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing XDG_RUNTIME_DIR
            pgserver = importlib.import_module("pgserver")
        if self._server is not None:  # it caches servers by directory, including dead ones
            type(self._server)._instances.pop(self.directory.resolve(), None)
        self._server = pgserver.get_server(self.directory, cleanup_mode="stop")

    @property
    def pid(self) -> int:
        """Return the pid of the postmaster."""
        return int((self.directory / "postmaster.pid").read_text().split()[0])

    def signal(self, number: signal.Signals) -> None:
        """Signal the postmaster and its children."""
        for pid in [*descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self._server.cleanup()


class CampaignCluster(Cluster):
    """A cluster of NODES nodes; `database_url` None: SQLite in the cluster's directory."""

    def __init__(
        self,
        database_url: str | None = None,
        *,
        namespaces: bool = False,
        fake_clock: bool = False,
    ) -> None:
        super().__init__(NODES, 0)
        if database_url is not None:
            self.database_url = database_url
        self._namespaces = namespaces
        self._fake_clock = fake_clock
        # prefix of the command of a node's agent
        self.prefixes: dict[int, list[str]] = {}
        if namespaces:
            _add_bridge()
            for number in range(NODES):
                _add_namespace(number)
            self.use_network(_SERVER)
            assert self.operator_token is not None
            os.environ["PACELINE_TOKEN"] = self.operator_token  # read by `paceline run`

    def agent_command(self, node: EmulatedNode) -> list[str]:
        command = super().agent_command(node)
        command[command.index("--orphan-grace-seconds") + 1] = "30"
        command[command.index("--checkpoint-seconds") + 1] = "30"
        if self._namespaces:
            command[command.index("--address") + 1] = f"{_NETWORK}.{node.number + 1}"
            command += ["--allow-plain-http"]
            command = ["ip", "netns", "exec", namespace(node.number), *command]
        return [*self.prefixes.get(node.number, ()), *command]

    def start_agent(self, node: EmulatedNode) -> None:
        if self._fake_clock:
            library = self.directory / "fake_clock.so"
            if not library.exists():
                _run("gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_FAKE_CLOCK))
            self.set_clock(node, 0)
            clock = f"FAKE_CLOCK={self._clock_of(node)}"
            self.prefixes[node.number] = ["env", f"LD_PRELOAD={library}", clock]
        super().start_agent(node)

    def set_clock(self, node: EmulatedNode, seconds: float) -> None:
        """Set the node's wall clock ahead of the correct time by this many seconds."""
        clock = self._clock_of(node)
        with clock.open("r+b" if clock.exists() else "wb") as file:
            file.write(int(seconds * 1e9).to_bytes(8, sys.byteorder, signed=True))

    def _clock_of(self, node: EmulatedNode) -> Path:
        return self.directory / f"{node.agent_id}.clock"

    def agent_pids(self, node: EmulatedNode) -> list[int]:
        """Return the processes of the agent and its guard, without those of ranks."""
        assert node.agent is not None
        return [node.agent.pid]

    def workers(self) -> list[int]:
        """Return the processes in which the server's job worker runs."""
        assert self.server is not None
        return descendants(self.server.pid)

    def close(self) -> int:
        orphans = super().close()
        if self._namespaces:
            for number in range(NODES):
                _run("ip", "netns", "del", namespace(number), check=False)
            _run("ip", "link", "del", _BRIDGE, check=False)
            os.environ.pop("PACELINE_TOKEN", None)
        return orphans


def namespace(number: int) -> str:
    """Return the name of a node's network namespace."""
    return f"paceline-n{number}"


@contextlib.contextmanager
def cut_off(number: int) -> Iterator[None]:
    """Cut a node off from all others and from the server."""
    _run("ip", "link", "set", f"paceline-v{number}", "down")
    try:
        yield
    finally:
        _run("ip", "link", "set", f"paceline-v{number}", "up")


def _add_bridge() -> None:
    _run("ip", "link", "del", _BRIDGE, check=False)
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{_SERVER}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")


def _add_namespace(number: int) -> None:
    name, outside, inside = namespace(number), f"paceline-v{number}", f"paceline-w{number}"
    _run("ip", "netns", "del", name, check=False)
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
    _run("ip", "link", "set", outside, "master", _BRIDGE, "up")
    _run("ip", "link", "set", inside, "netns", name)
    in_namespace = ("ip", "-n", name)
    _run(*in_namespace, "link", "set", inside, "name", "eth0")
    _run(*in_namespace, "addr", "add", f"{_NETWORK}.{number + 1}/24", "dev", "eth0")
    _run(*in_namespace, "link", "set", "eth0", "up")
    _run(*in_namespace, "link", "set", "lo", "up")


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, (command, done.stderr)
    return done.stdout


def wait_until(condition: Any, seconds: float, interval: float = 0.2) -> bool:
    """Poll `condition`; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
