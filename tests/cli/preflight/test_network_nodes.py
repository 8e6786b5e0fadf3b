"""Preflight with network namespaces as nodes: a problem of one node is found and named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.preflight.conftest import NetworkNodes


def preflight(nodes: NetworkNodes, *options: str) -> tuple[int, dict[str, Any]]:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "paceline_cli", "preflight", "--json"),
            *("--nodes", ",".join(nodes.names), "--exec", "ip netns exec {node}", *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        # The caller's settings are passed to the nodes, and another test may have left one set.
        env={name: value for name, value in os.environ.items() if not name.startswith("GLOO_")},
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def check_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [check for check in report["checks"] if check["name"] == name]
    return dict(found)


def test_a_node_behind_a_rate_limit_is_named(network_nodes: NetworkNodes) -> None:
    network_nodes.limit(1, "60mbit")
    status, report = preflight(network_nodes, "--patience", "60")
    slow = check_of(report, "node pairs: slow nodes")
    assert (slow["status"], slow["nodes"]) == ("fail", [network_nodes.names[1]]), report
    assert check_of(report, "node pairs: slow links")["status"] == "pass"
    assert status == 1
    pairs = [each for each in report["measurements"] if each.get("kind") == "pair"]
    limited = [each for each in pairs if network_nodes.names[1] in each["nodes"]]
    assert len(pairs) == 3
    assert all(each["bus_bytes_per_second"] < 15e6 for each in limited)  # 60 Mbit/s is 7.5 MB/s


@pytest.mark.campaign
def test_a_node_that_is_cut_off_is_named_and_the_others_are_measured(
    network_nodes: NetworkNodes,
) -> None:
    network_nodes.cut(0)  # the node where all would have met
    status, report = preflight(network_nodes, "--patience", "2")
    assert status == 1
    assert check_of(report, "nodes reach each other")["nodes"] == [network_nodes.names[0]]
    pairs = [each for each in report["measurements"] if each.get("bus_bytes_per_second")]
    assert network_nodes.names[1:] in [sorted(each["nodes"]) for each in pairs]


@pytest.mark.campaign
def test_a_pair_that_does_not_connect_is_named_as_a_pair(network_nodes: NetworkNodes) -> None:
    network_nodes.block(1, 2)
    _, report = preflight(network_nodes, "--patience", "2")
    unreached = check_of(report, "nodes reach each other")
    assert (unreached["status"], unreached["nodes"]) == ("fail", network_nodes.names[1:])
    assert not [each for each in report["measurements"] if each["type"] == "failed"]


@pytest.mark.campaign
def test_another_mtu_is_named(network_nodes: NetworkNodes) -> None:
    network_nodes.set_mtu(2, 1400)
    status, report = preflight(network_nodes, "--no-benchmarks")
    assert (status, check_of(report, "MTU")["nodes"]) == (1, [network_nodes.names[2]])


def test_an_end_by_signal_leaves_no_process(network_nodes: NetworkNodes) -> None:
    """The command is ended while it queries nodes.

    A process that would run for a minute is gone.
    """
    marker = f"3{os.getpid()}"
    nodes = ",".join(network_nodes.names)
    template = f"ip netns exec {{node}} sh -c 'exec sleep {marker}'"
    running = subprocess.Popen(
        [sys.executable, "-m", "paceline_cli", "preflight", "--nodes", nodes, "--exec", template],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: len(sleeping(marker)) == 3)
    running.terminate()
    assert running.wait(60) != 0
    assert wait_for(lambda: sleeping(marker) == [])


def sleeping(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[:2] == [b"sleep", marker.encode()]:
                found.append(path.parent.name)
    return found


def wait_for(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()
