"""Nodes that are network namespaces: real interfaces, real sockets, real rate limits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path

_NETWORKS = [f"10.213.{number}" for number in range(7, 256)]
_serial = count()
_CONNECTION = re.compile(r"(\S+:\d+)\s+(\S+:\d+)\s+users:(\S+)")  # as `ss -p` shows it
_PID = re.compile(r"pid=(\d+)")
# The names that `NetworkNodes` gives, and the process that has given them.
_NODE_NAME = re.compile(r"^(plnode(\d+)[a-z]\d+)\b", re.MULTILINE)
_BRIDGE_NAME = re.compile(r"^\d+: (pb(\d+)[a-z]):", re.MULTILINE)


class NetworkError(Exception):
    """Network namespaces cannot be made here, or a command about one failed."""


class NetworkNodes:
    """Network namespaces (`names`) on one bridge, with 10.213.7.N/24 on `eth0` of node N.

    Instead of 7 it is the next number whose network neither this machine nor another evaluation on
    it has.

    `cleanup` gets the calls that remove them.

    Raises:
        NetworkError: a command failed, for example because this user may not make namespaces.
    """

    def __init__(self, number_of_nodes: int, cleanup: ExitStack) -> None:
        _remove_stale()
        # Namespaces disappear some time after they are deleted, so no name is used twice.
        self._mark = f"{os.getpid()}{chr(ord('a') + next(_serial))}"
        self._network = _free_network(cleanup)
        self.server_address = f"{self._network}.254"  # address of the bridge on this machine
        self.bridge = f"pb{self._mark}"
        self.names = [f"plnode{self._mark}{number}" for number in range(number_of_nodes)]
        run("ip", "link", "add", self.bridge, "type", "bridge")
        cleanup.callback(run, "ip", "link", "del", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            cleanup.callback(run, "ip", "netns", "del", name)
            self._add(number, name)

    def address(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    def inside(self, number: int) -> tuple[str, ...]:
        """Return the beginning of a command that runs on the node."""
        return ("ip", "netns", "exec", self.names[number])

    def connect_to_server(self) -> None:
        """Give this machine an address that the nodes reach."""
        run("ip", "address", "add", f"{self.server_address}/24", "dev", self.bridge)

    def limit(self, number: int, rate: str) -> None:
        """Limit the traffic of the node in both directions, like a port at a lower speed."""
        queue = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        run(*self.inside(number), "tc", "qdisc", "add", "dev", "eth0", *queue)
        run("tc", "qdisc", "add", "dev", self._port(number), *queue)

    def unlimit(self, number: int) -> None:
        run(*self.inside(number), "tc", "qdisc", "del", "dev", "eth0", "root")
        run("tc", "qdisc", "del", "dev", self._port(number), "root")

    def sent_bytes(self, number: int) -> int:
        """Return the number of bytes that the node has sent."""
        counter = f"/sys/class/net/{self._port(number)}/statistics/rx_bytes"
        with open(counter) as file:
            return int(file.read())

    def cut(self, number: int) -> None:
        run("ip", "link", "set", self._port(number), "down")

    def restore(self, number: int) -> None:
        run("ip", "link", "set", self._port(number), "up")

    def block(self, one: int, other: int) -> None:
        route = ("route", "add", "blackhole", f"{self.address(other)}/32")
        run("ip", "-n", self.names[one], *route)

    def reset(self, number: int, pid: int, peers: set[int]) -> None:
        """Have the kernel of the node close the connections of process `pid` to its peers."""
        ends = {}
        for name in self.names:
            shown = run("ip", "netns", "exec", name, "ss", "-tnpHO", "state", "established")
            for local, remote, users in _CONNECTION.findall(shown):
                ends[local] = (remote, set(map(int, _PID.findall(users))))
        ports = {
            local.rpartition(":")[2]
            for local, (remote, pids) in ends.items()
            if pid in pids and ends.get(remote, ("", set()))[1] & peers - {pid}
        }
        filters = " or ".join(f"sport = :{port}" for port in ports)
        run(*self.inside(number), "ss", "-K", "-t", "state", "established", f"( {filters} )")

    def set_mtu(self, number: int, mtu: int) -> None:
        run(*self.inside(number), "ip", "link", "set", "eth0", "mtu", str(mtu))

    def _add(self, number: int, name: str) -> None:
        port = self._port(number)
        inside = ("ip", "-n", name)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
        run("ip", "link", "set", port, "master", self.bridge, "up")
        run(*inside, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")

    def _port(self, number: int) -> str:
        return f"pv{self._mark}{number}"


@cache
def why_unavailable() -> str | None:
    """Return why network namespaces cannot be made here; None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' or '.join(missing)} here (Debian: apt install iproute2)"
    try:
        with ExitStack() as cleanup:
            NetworkNodes(1, cleanup)
    except NetworkError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def run(*command: str) -> str:
    """Run the command and return what it prints."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NetworkError(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout


def _remove_stale() -> None:
    """Remove the namespaces and bridges of evaluations that were killed, and what runs there."""

    def is_stale(owner: str) -> bool:
        return not Path("/proc", owner).exists()

    for name, owner in _NODE_NAME.findall(run("ip", "netns", "list")):
        if is_stale(owner):
            with contextlib.suppress(NetworkError):  # another evaluation removes it, too
                for pid in run("ip", "netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                run("ip", "netns", "del", name)
    for name, owner in _BRIDGE_NAME.findall(run("ip", "-o", "link", "show", "type", "bridge")):
        if is_stale(owner):
            with contextlib.suppress(NetworkError):
                run("ip", "link", "del", name)


def _free_network(cleanup: ExitStack) -> str:
    """Return a network without an address here, and keep it from others until `cleanup`.

    An address may remain of an evaluation that was killed; another one may be about to add one.
    """
    for network in _NETWORKS:
        lock = Path(tempfile.gettempdir()) / f"paceline-network-{network}"
        with ExitStack() as attempt, contextlib.suppress(BlockingIOError):
            fcntl.flock(attempt.enter_context(lock.open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if f" {network}." not in run("ip", "-o", "address"):
                cleanup.push(attempt.pop_all())
                return network
    raise NetworkError(f"the networks {_NETWORKS[0]} to {_NETWORKS[-1]} are all in use here")
