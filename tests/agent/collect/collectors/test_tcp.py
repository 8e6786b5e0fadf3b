from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline_agent.collect.collectors import tcp as tcp_module
from paceline_agent.collect.collectors.tcp import TcpCollector
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_agent.collect.interface_addresses import carriers
from paceline_agent.collect.socket_diagnosis import connections, sockets_of
from tests.cli.preflight.conftest import NetworkNodes

MINUTE_NS = 60 * 10**9
RANK = "{job=job-a,rank=3}"


@contextlib.contextmanager
def connection(family=socket.AF_INET, host="127.0.0.1"):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, 0), family=family))
        client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        accepted, _ = server.accept()
        stack.enter_context(accepted)
        yield client, accepted


@pytest.fixture
def tcp(context):
    """Context with one rank, this process."""
    try:
        connections()
    except OSError as error:
        pytest.skip(f"no TCP diagnosis here: {error}")
    ranks = [
        LocalRank(job="job-a", generation=0, rank=3, local_rank=0, pid=os.getpid()),
        # the process is gone
        LocalRank(job="job-a", generation=0, rank=4, local_rank=1, pid=1 << 22),
    ]
    return TcpCollector(
        dataclasses.replace(context, procfs_root=Path("/proc"), local_ranks=lambda: ranks)
    )


def test_both_ends_of_a_connection_are_this_processs():
    with connection() as (client, accepted):
        inodes = {os.fstat(each.fileno()).st_ino for each in (client, accepted)}
        found = sockets_of(Path("/proc"), os.getpid())
        assert found is not None
        assert inodes <= found


def test_bytes_go_on_when_a_connection_is_closed(tcp, series):
    before = series(tcp.collect(0))
    received = f"paceline_rank_tcp_received_bytes_total{RANK}"
    with connection() as (client, accepted):
        client.sendall(b"x" * 5000)
        assert len(accepted.recv(5000, socket.MSG_WAITALL)) == 5000
        during = series(tcp.collect(MINUTE_NS))
    after = series(tcp.collect(2 * MINUTE_NS))
    count = f"paceline_rank_tcp_connections{RANK}"
    assert during[count] - before[count] == 2
    assert during[received] - before[received] == 5000
    assert after[received] >= during[received]
    assert after[count] == before[count]
    assert after[f"paceline_rank_tcp_retransmitted_segments_total{RANK}"] >= 0
    assert not any("rank=4" in name for name in after)  # the process is gone: unknown, not 0


def test_connections_of_new_ranks_are_found_within_seconds(tcp, series):
    """A rank is known before it connects, and later counts are compared with its first steps."""
    count, second = f"paceline_rank_tcp_connections{RANK}", 10**9
    before = series(tcp.collect(0))[count]
    with connection():
        found = [series(tcp.collect(at * second))[count] - before for at in (3, 6)]
    assert found == [2, 2]


def test_the_longer_ranks_are_known_the_more_rarely_they_are_looked_at(tcp, monkeypatch):
    scans = []
    monkeypatch.setattr(tcp_module, "sockets_of", lambda _, pid: scans.append(pid))
    for second in range(0, 200, 3):
        tcp.collect(second * 10**9)
    assert 6 <= len(scans) / 2 <= 12, "of two ranks"


def test_time_in_which_the_receiver_does_not_read_is_not_sending(tcp, series):
    sending = f"paceline_rank_tcp_sending_seconds_total{RANK}"
    with connection() as (client, _):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(b"x" * 65536)
        full, since = series(tcp.collect(0)), time.monotonic()
        time.sleep(0.5)
        later, elapsed = series(tcp.collect(MINUTE_NS)), time.monotonic() - since
    after = series(tcp.collect(2 * MINUTE_NS))
    assert later[sending] - full[sending] < elapsed / 2
    assert after[sending] >= later[sending]


def test_connections_between_local_processes_use_the_loopback_interface(tcp, series):
    with connection():
        found = series(tcp.collect(0))
    assert found["paceline_rank_tcp_interface_info{device=lo,job=job-a,rank=3}"] == 1


CONNECTED = """
import os, pathlib, socket, sys
from paceline_agent.collect.collectors.tcp import TcpCollector
from paceline_agent.collect.contract import Context, LocalRank
rank = LocalRank(job="job-a", generation=0, rank=3, local_rank=0, pid=os.getpid())
context = Context(
    node_directory=pathlib.Path("/nowhere"), sysfs_root=pathlib.Path("/sys"),
    procfs_root=pathlib.Path("/proc"), kmsg_path=pathlib.Path("/dev/null"),
    local_ranks=lambda: [rank],
)
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as connection:
    connection.sendall(bytes(1_000_000))
    connection.recv(1)
    for sample in TcpCollector(context).collect(0).samples:
        if sample.name.endswith("_info"):
            print(sample.labels["device"])
        if sample.name.endswith("_sending_seconds_total"):
            print(sample.value)
"""
LISTENING = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
left = 1_000_000
while left:
    left -= len(connection.recv(left))
connection.send(b"x")
connection.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_connections_to_another_machine_use_the_interface_of_their_address_and_take_time(tcp):
    with contextlib.ExitStack() as cleanup:
        nodes = NetworkNodes(2, cleanup)
        nodes.limit(0, "8mbit")  # a second for what is sent
        here, there = (("ip", "netns", "exec", name) for name in nodes.names)
        command = [*there, sys.executable, "-c", LISTENING]
        server = cleanup.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        cleanup.callback(server.kill)
        port = server.stdout.readline().strip()
        found = subprocess.run(
            [*here, sys.executable, "-c", CONNECTED, nodes.address(1), port],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        seconds, interface = sorted(found.stdout.split())
        assert interface == "eth0", found.stderr
        assert float(seconds) > 0.5


def test_a_bond_below_a_vlan_is_carried_by_its_cards(tmp_path):
    for interface, lower in (("vlan7", "bond0"), ("bond0", "eth0"), ("bond0", "eth1")):
        (tmp_path / "class/net" / interface / f"lower_{lower}").mkdir(parents=True)
    assert carriers(tmp_path, "vlan7") == {"vlan7", "bond0", "eth0", "eth1"}
    assert carriers(tmp_path, "eth9") == {"eth9"}


def test_ipv6_counts_too(tcp, series):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    try:
        with connection(socket.AF_INET6, "::1"):
            assert series(tcp.collect(1))[f"paceline_rank_tcp_connections{RANK}"] >= 2
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_a_copied_tree_is_unavailable(context):
    with pytest.raises(CollectorUnavailable):
        TcpCollector(context).collect(1)
