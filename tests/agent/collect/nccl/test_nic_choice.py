from __future__ import annotations

import pytest

from paceline_agent.collect.nccl.nic_choice import allowed, chosen

RDMA = ["mlx5_0", "mlx5_1", "mlx5_10", "bnxt_re0"]
NETWORK = ["lo", "docker0", "eth0", "ens1"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("", RDMA),
        ("mlx5", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1:1,bnxt_re0", ["mlx5_1", "bnxt_re0"]),
        ("^mlx5_1", ["mlx5_0", "bnxt_re0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10", "bnxt_re0"]),
        ("nothing", []),
    ],
)
def test_lists(wanted, names):
    assert chosen(wanted, RDMA) == names


@pytest.mark.parametrize(
    ("settings", "kind", "names"),
    [
        ({}, "rdma", RDMA),
        ({"NCCL_IB_DISABLE": "1"}, "nic", ["eth0", "ens1"]),
        ({"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0"}, "nic", ["eth0"]),
    ],
)
def test_over_what(settings, kind, names):
    assert allowed(settings, RDMA, NETWORK) == (kind, names)


def test_without_rdma_it_is_the_network():
    assert allowed({"NCCL_IB_HCA": "mlx5"}, [], NETWORK) == ("nic", ["eth0", "ens1"])
