"""The GPU of each rank, as an info metric.

Metrics of GPUs have no job label and metrics of ranks no GPU label, because otherwise each restart
would create new series. A query joins them:

    DCGM_FI_DEV_SM_CLOCK * on (UUID) group_left (job, rank) paceline_rank_info
"""

from __future__ import annotations

from typing import ClassVar

from paceline_agent.collect.contract import Collected, Collector, LocalRank, Metric
from paceline_wire.batch import GpuInfo, Sample

METRICS = (
    Metric(
        "paceline_rank_info",
        "info",
        None,
        "The GPU of each rank of this node, to join metrics of the one with the other.",
    ),
)


class RanksCollector(Collector):
    name: ClassVar[str] = "ranks"
    interval_seconds: ClassVar[float] = 5.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def collect(self, now_ns: int) -> Collected:
        samples = []
        for rank in self.context.local_ranks():
            gpu = self.context.gpu_of(rank)
            labels = _labels(rank, gpu) | {"Hostname": self.context.hostname}
            samples.append(Sample("paceline_rank_info", labels, 1.0, now_ns))
        return Collected(samples=samples)


def _labels(rank: LocalRank, gpu: GpuInfo | None) -> dict[str, str]:
    labels = {
        "job": rank.job,
        "generation": str(rank.generation),
        "rank": str(rank.rank),
        "local_rank": str(rank.local_rank),
    }
    if gpu is not None:
        labels |= {"gpu": str(gpu.index), "UUID": gpu.uuid, "pci_bus_id": gpu.pci_bus_id}
    return labels
