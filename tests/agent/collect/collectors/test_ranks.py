from __future__ import annotations

import dataclasses

from paceline_agent.collect.collectors.ranks import RanksCollector
from paceline_agent.collect.contract import LocalRank
from paceline_wire.batch import GpuInfo

RANKS = [
    LocalRank(job="job-a", generation=2, rank=8, local_rank=0, pid=100, gpu_index=1),
    # its GPU is unknown
    LocalRank(job="job-a", generation=2, rank=9, local_rank=1, pid=101, gpu_index=7),
    LocalRank(job="job-b", generation=0, rank=0, local_rank=0, pid=102),
]


def test_golden(context, series):
    context.inventory.gpus = (
        GpuInfo(index=1, uuid="GPU-b", name="NVIDIA H200", pci_bus_id="00000000:2B:00.0"),
    )
    collector = RanksCollector(dataclasses.replace(context, local_ranks=lambda: RANKS))
    assert set(series(collector.collect(1))) == {
        "paceline_rank_info{Hostname=node-0,UUID=GPU-b,generation=2,gpu=1,job=job-a,"
        "local_rank=0,pci_bus_id=00000000:2B:00.0,rank=8}",
        "paceline_rank_info{Hostname=node-0,generation=2,job=job-a,local_rank=1,rank=9}",
        "paceline_rank_info{Hostname=node-0,generation=0,job=job-b,local_rank=0,rank=0}",
    }


def test_a_node_without_ranks_is_no_trouble(context):
    assert RanksCollector(context).collect(1).samples == []
