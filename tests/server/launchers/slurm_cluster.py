"""A real Slurm cluster on this host: munged, slurmctld and several slurmd, as root.

It needs Debian's packages munge, slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins.
Everything is in one directory; ports and sockets are its own, so it can run beside another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "squeue", "sinfo", "scancel")
_SYSTEM = "/usr/sbin"

_CONFIGURATION = """\
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobRequeue=1
SlurmdTimeout=10
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    absent = [name for name in PROGRAMS if _path(name) is None]
    if absent:
        return f"needs Slurm ({', '.join(absent)} missing): see tests/server/launchers"
    return None if os.geteuid() == 0 else "starts slurmd, which needs root"


class SlurmCluster:
    """The cluster. `environment` is that of commands which use it."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory = directory
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        self._ports = {name: _free_port() for name in (*self.nodes, "controller")}

    def start(self, wait_for: Callable[..., object]) -> None:
        """Start all daemons and wait until every node is idle."""
        for name in ("munge", "state", "spool", *(f"spool/{node}" for node in self.nodes)):
            (self.directory / name).mkdir(mode=0o711)
        self.directory.chmod(0o755)  # munged refuses what others could replace
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 "
            f"Port={self._ports[node]}"
            for node in self.nodes
        )
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=host,
                directory=self.directory,
                controller_port=self._ports["controller"],
                nodes=nodes,
            )
        )
        self._start_munge()
        self._run(_program("slurmctld"), "-i")
        for node in self.nodes:
            self.start_node(node)
        wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "idle nodes")

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        self._run(
            *(_program("munged"), "--force"),
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )

    def start_node(self, node: str) -> None:
        """Start the node's slurmd."""
        self._run(_program("slurmd"), "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd; its tasks keep running."""
        os.kill(int((self.directory / f"{node}.pid").read_text()), signal.SIGKILL)

    @contextlib.contextmanager
    def paused_controller(self) -> Iterator[None]:
        """Have slurmctld answer nothing meanwhile."""
        pid = int((self.directory / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End all jobs and daemons."""
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "-u", "root"],
            env=self.environment,
            check=False,
            capture_output=True,
        )
        subprocess.run(["scancel", "-u", "root"], env=self.environment, check=False)
        deadline = time.monotonic() + 10
        while self._run("squeue", "-h", "-t", "R,CG", check=False) and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [f"{node}.pid" for node in self.nodes]
        for name in (*pids, "slurmctld.pid", "munge/pid"):
            _end(self.directory / name)

    # --- use ---------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self._run("sinfo", "-h", "-N", "-o", "%N %T", check=False).splitlines()
        return dict(line.split() for line in lines)

    def drain_reason(self, node: str) -> str:
        """Return the reason that the node shows."""
        return self._run("sinfo", "-h", "-N", "-n", node, "-o", "%E").strip()

    def resume(self, node: str) -> None:
        """Return a drained node to service."""
        self.control("update", f"NodeName={node}", "State=RESUME")

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch job and return its id."""
        return self._run("sbatch", "--parsable", *options, str(script)).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return fields of the job, as `scontrol show job` has them."""
        words = self._run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def cancel(self, job: str) -> None:
        self._run("scancel", job)

    def control(self, *arguments: str) -> str:
        """Run scontrol and return its output."""
        return self._run("scontrol", *arguments)

    def _run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.environment, check=False, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def _path(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SYSTEM)


def _program(name: str) -> str:
    path = _path(name)
    assert path is not None
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(pid_file: Path) -> None:
    """End the process of a PID file and wait for it."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return
