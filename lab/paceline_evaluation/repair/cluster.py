"""The cluster of the repair arm: like the demo's, but everything in it can fail.

Its database is PostgreSQL or SQLite. As far as this machine permits (`why_missing`), each node has
a network namespace and a clock of its own, and the files of the server and the checkpoints are on a
small disk.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from paceline_demo.cluster import Cluster, EmulatedNode
from paceline_demo.faults import descendants
from paceline_evaluation.foreign.network_nodes import NetworkNodes, why_unavailable

NODES = 4  # a job of two nodes, and two spares
DISK_MEBIBYTES = 400
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
_REAPED_SECONDS = 30.0
_LOWEST = 19
_FAKE_CLOCK = Path(__file__).with_name("fake_clock.c")

Database = Literal["postgresql", "sqlite"]
Need = Literal["network", "clock", "disk", "memory group", "root", "postgresql"]


def wait_until(condition: Callable[[], object], seconds: float, interval: float = 0.2) -> bool:
    """Poll `condition`; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


class PostgreSQL:
    """A PostgreSQL server whose processes can be killed, stopped and started again."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-pg-"))
        self._server = self._open()
        self.url: str = self._server.get_uri()

    def start(self) -> None:
        """Start the server again after it was killed."""
        # The library and PostgreSQL take a process that was not reaped yet for a running server.
        process = Path(f"/proc/{self.pid}")
        wait_until(lambda: not process.exists(), _REAPED_SECONDS)
        # The library keeps servers by directory, including dead ones.
        type(self._server)._instances.pop(self.directory.resolve(), None)
        self._server = self._open()

    def _open(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing XDG_RUNTIME_DIR
            pgserver = importlib.import_module("pgserver")
        return pgserver.get_server(self.directory, cleanup_mode="stop")

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
        shutil.rmtree(self.directory, ignore_errors=True)


def why_missing(need: Need) -> str | None:
    """Return why this machine cannot provide something; None if it can."""
    if need == "network":
        return why_unavailable()
    if need == "postgresql":
        has_it = importlib.util.find_spec("pgserver") is not None
        return None if has_it else "the package pgserver is not installed"
    if os.geteuid() != 0:
        return "needs root"
    if need == "memory group":
        usable = os.access(MEMORY_CGROUP, os.W_OK)
        return None if usable else "memory control groups (version 1) are not mounted here"
    tool = {"clock": "gcc", "disk": "mount"}.get(need)
    return f"no {tool} here" if tool is not None and shutil.which(tool) is None else None


class RepairCluster(Cluster):
    """A cluster of NODES nodes. `running` starts and ends it."""

    def __init__(self, database: Database) -> None:
        super().__init__(NODES, 0)
        self._cleanup = ExitStack()
        self.network: NetworkNodes | None = None
        self.postgresql: PostgreSQL | None = None
        self._database = database
        self._has_fake_clock = why_missing("clock") is None
        # prefix of the command of a node's agent
        self.prefixes: dict[int, list[str]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start server and agents; end them and remove their files afterwards.

        Raises:
            click.ClickException: they do not start.
        """
        try:
            if why_missing("disk") is None:
                self._mount_small_disk()
            if self._database == "postgresql":
                self.postgresql = PostgreSQL()
                self._cleanup.callback(self.postgresql.close)
                self.database_url = self.postgresql.url
            if why_missing("network") is None:
                self._add_network()
            self.start()
            yield
        finally:
            self.close()
            self._cleanup.close()
            self.remove_logs()

    def agent_command(self, node: EmulatedNode) -> list[str]:
        command = super().agent_command(node)
        command[command.index("--orphan-grace-seconds") + 1] = "30"
        command[command.index("--checkpoint-seconds") + 1] = "30"
        if self.network is not None:
            command[command.index("--address") + 1] = self.network.address(node.number)
            command += ["--allow-plain-http"]
        return self.inside(node, command)

    def inside(self, node: EmulatedNode, command: list[str]) -> list[str]:
        """Return the command to run on the node, with its network and its clock."""
        network = () if self.network is None else self.network.inside(node.number)
        return [*self.prefixes.get(node.number, ()), *network, *command]

    def start_agent(self, node: EmulatedNode) -> None:
        if self._has_fake_clock and node.number not in self.prefixes:
            library = self.directory / "fake_clock.so"
            if not library.exists():
                command = ("gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_FAKE_CLOCK))
                subprocess.run(command, check=True)
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
        return self.memory / f"{node.agent_id}.clock"

    def workers(self) -> list[int]:
        """Return the processes in which the server's job worker runs."""
        assert self.server is not None
        return descendants(self.server.pid)

    def yield_processors(self) -> None:
        """Give server and database the lowest priority: they usually have another machine."""
        assert self.server is not None
        roots = [self.server.pid]
        if self.postgresql is not None:
            roots.append(self.postgresql.pid)
        lower_priority([pid for root in roots for pid in (root, *descendants(root))])

    def _mount_small_disk(self) -> None:
        options = f"size={DISK_MEBIBYTES}m"
        mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(self.directory)]
        subprocess.run(mount, check=True)
        self._cleanup.callback(
            subprocess.run, ["umount", "--lazy", str(self.directory)], check=True
        )

    def _add_network(self) -> None:
        self.network = NetworkNodes(NODES, self._cleanup)
        self.network.connect_to_server()
        self.use_network(self.network.server_address)
        assert self.operator_token is not None
        os.environ["PACELINE_TOKEN"] = self.operator_token  # read by `paceline run`
        self._cleanup.callback(os.environ.pop, "PACELINE_TOKEN", None)


def lower_priority(pids: Iterable[int]) -> None:
    """Give processes, their threads and what these will start the lowest priority.

    Where the kernel groups processes by session (`sched_autogroup_enabled`), it counts within a
    session only, so the sessions get it too.
    """
    for pid in pids:
        process = Path(f"/proc/{pid}")
        for thread in process.glob("task/*"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _LOWEST)
        with contextlib.suppress(OSError):  # a kernel without groups
            (process / "autogroup").write_text(str(_LOWEST))


def lock_sqlite(path: Path, seconds: float) -> None:
    """Hold SQLite's write lock for some seconds, in the background, as a backup tool may."""

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as held:
            held.execute("BEGIN EXCLUSIVE")
            threading.Event().wait(seconds)
            held.execute("ROLLBACK")

    threading.Thread(target=hold, daemon=True).start()
