from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.numa import NumaCollector, read_memory_maps
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_agent.collect.cpu_lists import parse_cpu_list
from paceline_wire.batch import GpuInfo

NODE = "devices/system/node"
TREE = {
    f"{NODE}/node0/cpulist": "0-3\n",
    f"{NODE}/node1/cpulist": "4-7\n",
    f"{NODE}/node0/numastat": "numa_hit 10\nnuma_miss 2\n",
    f"{NODE}/node1/numastat": "numa_hit 20\nnuma_miss 0\n",
    f"{NODE}/node1/meminfo": "Node 1 MemTotal:   2048 kB\nNode 1 Active(anon): 5 kB\n"
    "Node 1 HugePages_Free:     3\n",
    "bus/pci/devices/0000:1a:00.0/numa_node": "1\n",
    "bus/pci/devices/0000:2b:00.0/numa_node": "-1\n",
    "class/net/eth0/device/numa_node": "0\n",
    "class/infiniband/mlx5_0/device/numa_node": "1\n",
}
MAPS = """\
559a0000 bind:0 file=/usr/bin/python3.11 mapped=700 mapmax=8 N0=500 N1=200 kernelpagesize_kB=4
559b0000 bind:0 heap anon=100 dirty=100 N0=100 kernelpagesize_kB=4
7f000000 default file=/dev/shm/x huge dirty=2 N1=2 kernelpagesize_kB=2048
7f900000 bind:0 fi"""
RANKS = [
    LocalRank(job="job-a", generation=0, rank=4, local_rank=0, pid=100, gpu_index=0),
    LocalRank(job="job-a", generation=0, rank=5, local_rank=1, pid=101, gpu_index=0),
    LocalRank(job="job-a", generation=0, rank=6, local_rank=2, pid=102, gpu_index=1),
    # the process is gone
    LocalRank(job="job-a", generation=0, rank=7, local_rank=3, pid=999, gpu_index=0),
]


@pytest.fixture
def two_nodes(context, sysfs, procfs, write):
    write(sysfs, TREE)
    write(
        procfs,
        {
            "100/status": "Name:\tpython\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\n",
            "100/numa_maps": MAPS,
            "101/status": "Name:\tpython\nCpus_allowed_list:\t2-5\nMems_allowed_list:\t0-1\n",
            "102/status": "Name:\tpython\nCpus_allowed_list:\t0\n",
        },
    )
    context.inventory.gpus = (
        GpuInfo(index=0, uuid="GPU-a", name="NVIDIA H200", pci_bus_id="00000000:1A:00.0"),
        GpuInfo(index=1, uuid="GPU-b", name="NVIDIA H200", pci_bus_id="00000000:2B:00.0"),
    )
    return dataclasses.replace(context, local_ranks=lambda: RANKS)


def test_golden(two_nodes, series):
    assert series(NumaCollector(two_nodes).collect(1)) == {
        "node_memory_numa_numa_hit_total{node=0}": 10,
        "node_memory_numa_numa_miss_total{node=0}": 2,
        "node_memory_numa_numa_hit_total{node=1}": 20,
        "node_memory_numa_numa_miss_total{node=1}": 0,
        "node_memory_numa_MemTotal{node=1}": 2_097_152,
        "node_memory_numa_HugePages_Free{node=1}": 3,
        "paceline_device_numa_node{device=gpu0,kind=gpu}": 1,
        "paceline_device_numa_node{device=eth0,kind=nic}": 0,
        "paceline_device_numa_node{device=mlx5_0,kind=rdma}": 1,
        "paceline_rank_numa_node{job=job-a,rank=4}": 0,
        "paceline_rank_numa_misbound{job=job-a,rank=4}": 1,
        "paceline_rank_numa_misbound{job=job-a,rank=5}": 0,  # its CPUs are on both nodes
        "paceline_rank_numa_node{job=job-a,rank=6}": 0,  # its GPU's node is unknown
        "paceline_rank_affinity_info{cpus=0-3,job=job-a,memory_nodes=0-1,rank=4}": 1,
        "paceline_rank_affinity_info{cpus=2-5,job=job-a,memory_nodes=0-1,rank=5}": 1,
        "paceline_rank_affinity_info{cpus=0,job=job-a,memory_nodes=,rank=6}": 1,
        "paceline_rank_memory_policy_info{job=job-a,nodes=0,policy=bind,rank=4}": 1,
        "paceline_rank_numa_sampled_bytes{job=job-a,node=0,rank=4}": 600 * 4096,
        "paceline_rank_numa_sampled_bytes{job=job-a,node=1,rank=4}": 200 * 4096 + 2 * (2 << 20),
        "paceline_rank_memory_misbound{job=job-a,rank=4}": 1,  # its GPU is on node 1
        "paceline_rank_memory_misbound{job=job-a,rank=5}": 0,
    }


def test_a_machine_without_numa_is_unavailable(context):
    with pytest.raises(CollectorUnavailable):
        NumaCollector(context).collect(1)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8", {0, 1, 2, 8}), ("5", {5}), ("", set()), ("x,3", {3}), ("4-", {4})],
)
def test_cpu_lists(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("line", "policy", "nodes"),
    [
        ("7f00 default anon=1", "default", ""),
        ("7f00 prefer:1 anon=1", "prefer", "1"),
        ("7f00 prefer (many):0,2 stack", "prefer (many)", "0,2"),
        ("7f00 bind=static|relative:0-1 heap", "bind", "0-1"),
        ("7f00 weighted interleave:0-3 file=/a b", "weighted interleave", "0-3"),
        ("7f00 local", "local", ""),
    ],
)
def test_policies(procfs, write, line, policy, nodes):
    write(procfs, {"5/numa_maps": line + "\n"})
    maps = read_memory_maps(procfs, 5)
    assert (maps.policy, maps.nodes) == (policy, nodes)


def test_the_maps_of_this_process():
    maps = read_memory_maps(Path("/proc"), os.getpid())
    if maps is None:
        pytest.skip("this kernel has no numa_maps")
    assert maps.policy
    assert sum(maps.resident_bytes.values()) > 0


def test_an_excluded_device_is_not_read(two_nodes, series):
    shut = dataclasses.replace(two_nodes, excluded_rdma=frozenset({"mlx5_*"}))
    assert not any("mlx5" in name for name in series(NumaCollector(shut).collect(1)))
