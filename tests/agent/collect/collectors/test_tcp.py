from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.tcp import TcpCollector
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_agent.collect.socket_diagnosis import connections, sockets_of

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
