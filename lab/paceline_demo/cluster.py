"""The demo's cluster: one server and one agent per node, as real processes on this machine.

Every process carries the run's mark in its environment, so that all of them can be found and
counted, whatever started them. The kernel kills server and agents when the demo dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import httpx

from paceline_cli import companions
from paceline_demo import fake_nvml

MARK = "PACELINE_DEMO"
GPUS_PER_NODE = 2
START_SECONDS = 180.0  # for the server, and again for the agents, on a busy machine
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Runs between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_process(
    argv: list[str], log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that appends its output to `log` and dies with the demo."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # only the demo receives Ctrl-C
            preexec_fn=die_with_parent,
        )


@dataclass
class EmulatedNode:
    """An emulated machine: a directory and an agent."""

    number: int
    directory: Path
    agent: subprocess.Popen[bytes] | None = None
    gpus: fake_nvml.FakeGpus | None = None

    @property
    def agent_id(self) -> str:
        return f"node-{self.number}"


@dataclass
class Cluster:
    """A server, its agents and their directories. `close` ends and removes all of them."""

    node_count: int  # including spares
    port: int
    directory: Path = field(init=False)
    memory: Path = field(init=False)
    mark: str = field(init=False)
    url: str = field(init=False)
    nodes: list[EmulatedNode] = field(default_factory=list)
    library: Path | None = None  # directory of the emulated driver
    telemetry: str = "emulated"  # "emulated", "driver" or "none"
    server: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"  # address of the server
    database_url: str = field(init=False)
    agent_token: str | None = None  # None: agents and users of this machine need none
    operator_token: str | None = None

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        prefix = f"paceline-demo-{os.getpid()}-"
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        shared = Path("/dev/shm")
        self.memory = Path(tempfile.mkdtemp(prefix=prefix, dir=shared if shared.is_dir() else None))
        remove_stale_rings(self.memory.parent)
        self.port = free_port(self.port)
        self.url = f"http://{self.host}:{self.port}"
        self.database_url = f"sqlite:///{self.directory / 'paceline.db'}"

    def use_network(self, server_address: str) -> None:
        """Have the server listen on a network of its nodes, which needs tokens; before `launch`.

        Ranks use the interface `eth0` of their nodes.
        """
        self.host = server_address
        self.url = f"http://{self.host}:{self.port}"
        self.agent_token = self._create_token("agent")
        self.operator_token = self._create_token("operator")

    def start(self) -> None:
        """Start server and agents and wait until every node has reported.

        Raises click.ClickException with the end of the server's log if they do not start.
        """
        self.launch()
        self.wait_for_server(lambda: None)
        self.wait_for_nodes(lambda _: None)

    def launch(self) -> None:
        """Start the processes of server and agents."""
        self.library = self._gpu_library()
        self.start_server()
        for number in range(self.node_count):
            node = EmulatedNode(number, self.memory / f"node-{number}")
            node.directory.mkdir()
            if self.library is not None:
                node.gpus = fake_nvml.FakeGpus.create(node.directory / "gpus", GPUS_PER_NODE)
            self.nodes.append(node)
            self.start_agent(node)

    def start_server(self) -> None:
        """Start the server, also again after its end."""
        self.server = start_process(
            self.server_command(), self.directory / "server.log", self.environment()
        )

    def server_command(self) -> list[str]:
        """Return the command of the server."""
        return [
            *(sys.executable, "-P", "-m", "paceline_cli", "server"),
            *("--host", self.host, "--port", str(self.port)),
            *("--database-url", self.database_url),
        ]

    def wait_for_server(self, on_wait: Callable[[], None]) -> None:
        """Wait until the server responds; call `on_wait` meanwhile.

        Raises click.ClickException with the end of the server's log if it does not.
        """
        self._wait(lambda reporting: on_wait(), lambda reporting: reporting is not None)

    def wait_for_nodes(self, on_wait: Callable[[int], None]) -> None:
        """Wait until every node has reported; call `on_wait` with their number meanwhile.

        Raises click.ClickException with the end of the server's log if one does not.
        """
        self._wait(
            lambda reporting: on_wait(reporting or 0),
            lambda reporting: reporting == self.node_count,
        )

    def start_agent(self, node: EmulatedNode) -> None:
        """Start the node's agent, also again after its node was lost."""
        environment = self.environment()
        if self.library is not None and node.gpus is not None:
            environment |= fake_nvml.environment(self.library, node.gpus.path)
        log = self.directory / f"{node.agent_id}.log"
        node.agent = start_process(self.agent_command(node), log, environment)

    def agent_command(self, node: EmulatedNode) -> list[str]:
        """Return the command of a node's agent."""
        return [
            *(sys.executable, "-P", "-m", "paceline_cli", "agent", "--server", self.url),
            *("--agent-id", node.agent_id, "--node-directory", str(node.directory)),
            *_own_user(),
            *("--orphan-grace-seconds", "0"),  # the demo never restarts a running agent
            *("--checkpoint-seconds", "0"),  # nor does it resume a job after its own end
            *("--spool-directory", str(self.directory / f"{node.agent_id}-spool")),
            *("--slots", str(GPUS_PER_NODE), "--address", "127.0.0.1"),
            *("--metrics-port", "0", "--exit-with-parent", str(os.getpid())),
        ]

    def processes(self) -> list[int]:
        """Return the PIDs of all live processes of this run, except this one."""
        return processes_with(MARK, self.mark)

    def close(self) -> int:
        """Stop everything. Return how many orphaned processes had to be killed."""
        agents = [node.agent for node in self.nodes if node.agent is not None]
        started = [*agents, *filter(None, [self.server])]
        for group in (agents, [self.server]):
            for process in group:
                if process is not None and process.poll() is None:
                    process.terminate()
            for process in group:
                if process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=8)
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        deadline = time.monotonic() + 3
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)
        return len(left)

    def remove_logs(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of the cluster."""
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # the demo emulates its GPUs, even on a GPU machine
        }
        if self.agent_token is not None:
            environment |= {"PACELINE_AGENT_TOKEN": self.agent_token, "GLOO_SOCKET_IFNAME": "eth0"}
        return environment

    def _create_token(self, scope: str) -> str:
        program = [sys.executable, "-P", "-m", "paceline_cli", "server"]
        database = ["--database-url", self.database_url]
        options = ["token", "create", "--name", scope, "--nodes", "0", "--scope", scope]
        created = subprocess.run(
            [*program, *database, *options], capture_output=True, text=True, check=True
        )
        return created.stdout.strip()

    def _gpu_library(self) -> Path | None:
        """Return the emulated driver's directory; None with a real driver or without a compiler."""
        if has_driver():
            self.telemetry = "driver"
            return None
        try:
            library = self._build_gpu_library()
        except fake_nvml.CompilerMissing:
            self.telemetry = "none"
            return None
        self.telemetry = "emulated"
        return library

    def _build_gpu_library(self) -> Path:
        """Build the library in the user's cache; without one, in the directory of this run."""
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            return fake_nvml.build(cache / "paceline")
        except (OSError, RuntimeError):  # the home directory is missing or cannot be written
            return fake_nvml.build(self.directory)

    def _wait(
        self,
        on_wait: Callable[[int | None], None],
        is_done: Callable[[int | None], bool],
    ) -> None:
        """Poll how many nodes have reported (None: the server does not respond) until `is_done`."""
        assert self.server is not None
        token = self.operator_token
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.server.poll() is None:
            reporting = None
            with contextlib.suppress(httpx.TransportError):
                response = httpx.get(
                    f"{self.url}/api/v1/nodes", headers=headers, timeout=2, trust_env=False
                )
                if response.status_code == 200:
                    reporting = len(response.json()["items"])
            if is_done(reporting):
                return
            on_wait(reporting)
            time.sleep(0.1)
        log = (self.directory / "server.log").read_text(errors="replace")[-2000:]
        raise click.ClickException(
            f"server and agents did not start; the server's log ends with:\n{log}"
        )


def processes_with(variable: str, value: str) -> list[int]:
    """Return the live processes that have this in their environment, except this one."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return found


def _own_user() -> list[str]:
    """Return the agent's options that make all files of a demo belong to the user who runs it."""
    return ["--run-as", "root"] if os.geteuid() == 0 else []


def remove_stale_rings(parent: Path) -> None:
    """Remove the rings of demos that were killed: they occupy memory."""
    for node in parent.glob("paceline-demo-*-*/node-0"):
        pid = node.parent.name.split("-")[2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(node.parent, ignore_errors=True)


def has_driver() -> bool:
    """Return whether a real NVIDIA driver is loaded on this machine."""
    return Path("/proc/driver/nvidia/version").exists()


def free_port(wanted: int) -> int:
    """Return `wanted` if that TCP port is free, else any free port."""
    try:
        return companions.free_port(wanted)
    except OSError as error:
        raise click.ClickException(str(error)) from error
