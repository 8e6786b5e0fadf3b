"""Nodes that are network namespaces: real interfaces, real sockets, real rate limits."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

_serial = count()


class NetworkNodes:
    """Network namespaces (`names`) on one bridge, with 10.213.7.N/24 on `eth0` of node N."""

    def __init__(self, number_of_nodes: int, cleanup: ExitStack) -> None:
        # Namespaces disappear some time after they are deleted, so no name is used twice.
        self._mark = f"{os.getpid()}{chr(ord('a') + next(_serial))}"
        self.bridge = f"pb{self._mark}"
        self.names = [f"plnode{self._mark}{number}" for number in range(number_of_nodes)]
        self._run("ip", "link", "add", self.bridge, "type", "bridge")
        cleanup.callback(self._run, "ip", "link", "del", self.bridge)
        self._run("ip", "link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            cleanup.callback(self._run, "ip", "netns", "del", name)
            self._add(number, name)

    def limit(self, number: int, rate: str) -> None:
        """Limit the traffic of the node in both directions, like a port at a lower speed."""
        queue = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        inside = ("ip", "netns", "exec", self.names[number])
        self._run(*inside, "tc", "qdisc", "add", "dev", "eth0", *queue)
        self._run("tc", "qdisc", "add", "dev", self._port(number), *queue)

    def cut(self, number: int) -> None:
        self._run("ip", "link", "set", self._port(number), "down")

    def block(self, one: int, other: int) -> None:
        route = ("route", "add", "blackhole", f"10.213.7.{other + 1}/32")
        self._run("ip", "-n", self.names[one], *route)

    def set_mtu(self, number: int, mtu: int) -> None:
        inside = ("ip", "netns", "exec", self.names[number])
        self._run(*inside, "ip", "link", "set", "eth0", "mtu", str(mtu))

    def _add(self, number: int, name: str) -> None:
        port = self._port(number)
        inside = ("ip", "-n", name)
        self._run("ip", "netns", "add", name)
        self._run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
        self._run("ip", "link", "set", port, "master", self.bridge, "up")
        self._run(*inside, "address", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
        self._run(*inside, "link", "set", "lo", "up")
        self._run(*inside, "link", "set", "eth0", "up")

    def _port(self, number: int) -> str:
        return f"pv{self._mark}{number}"

    def _run(self, *command: str) -> None:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"


@pytest.fixture
def network_nodes() -> Iterator[NetworkNodes]:
    """Three nodes; the test is skipped if they cannot be created."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"NOT TESTED: no {' or '.join(missing)} here (Debian: apt install iproute2)")
    made = subprocess.run(
        ["ip", "netns", "add", f"pltry{os.getpid()}"], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"NOT TESTED: network namespaces cannot be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", f"pltry{os.getpid()}"], check=True)
    with ExitStack() as cleanup:
        yield NetworkNodes(3, cleanup)
