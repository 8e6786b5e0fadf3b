"""The micro-benchmarks of one node: starts one process per rank and ends them all.

`python -m paceline_cli.preflight.probe_node PLAN [NODE]`; without NODE it is found by hostname.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from paceline_cli.preflight.network_facts import addresses
from paceline_cli.preflight.plan import BenchmarkPlan, FailedNode, line

_POLL_SECONDS = 0.05


def main(arguments: list[str]) -> int:
    plan = BenchmarkPlan.decode(arguments[0])
    node = int(arguments[1]) if len(arguments) > 1 else _which(plan)
    environment = dict(os.environ)
    interface = _interface_towards(plan.address, plan.port)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = [sys.executable, "-P", "-m", "paceline_cli.preflight.probe", arguments[0], str(node)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ranks = [
        subprocess.Popen([*command, str(local)], env=environment)
        for local in range(plan.ranks_of_nodes[node])
    ]
    try:
        return _wait(ranks, plan, node)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], plan: BenchmarkPlan, node: int) -> int:
    deadline = time.monotonic() + plan.deadline_seconds
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            error = f"not done within {plan.deadline_seconds:g} s"
            print(line(FailedNode(node=plan.nodes[node], error=error)), flush=True)
            return 1
        time.sleep(_POLL_SECONDS)
    bad = [rank.returncode for rank in ranks if rank.returncode]
    if bad:
        error = f"a process ended with status {bad[0]}"
        print(line(FailedNode(node=plan.nodes[node], error=error)), flush=True)
    return 1 if bad else 0


def _which(plan: BenchmarkPlan) -> int:
    try:
        return plan.hostnames.index(socket.gethostname())
    except ValueError:
        sys.exit(f"{socket.gethostname()} is not one of {', '.join(plan.hostnames)}")


def _interface_towards(address: str, port: int) -> str | None:
    """Return the interface through which the kernel reaches node 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, port))  # sends nothing
        except OSError:
            return None
        own = asked.getsockname()[0]
    for _, name in socket.if_nameindex():
        if any(each.partition("/")[0] == own for each in addresses(name)):
            return name
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
