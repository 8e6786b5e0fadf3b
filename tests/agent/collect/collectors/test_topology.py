from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from paceline_agent.collect.collectors.topology import TopologyCollector
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_wire.batch import GpuInfo

# Two sockets. The first has a switch with a GPU and an adapter, and behind it another switch with
# an adapter; a second root port with an adapter; and a second host bridge with a GPU. The other
# socket has a GPU and an adapter on a switch.
FIRST = "pci0000:15/0000:15:01.0/0000:16:00.0"
WAYS = {
    "gpu0": (f"{FIRST}/0000:17:00.0/0000:18:00.0", 0),
    "mlx5_0": (f"{FIRST}/0000:17:01.0/0000:19:00.0", 0),
    "mlx5_1": (f"{FIRST}/0000:17:02.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0", 0),
    "mlx5_2": ("pci0000:15/0000:15:03.0/0000:1e:00.0", 0),
    "gpu1": ("pci0000:26/0000:26:01.0/0000:27:00.0", 0),
    "gpu2": ("pci0000:85/0000:85:01.0/0000:86:00.0/0000:87:00.0/0000:88:00.0", 1),
    "mlx5_3": ("pci0000:85/0000:85:01.0/0000:86:00.0/0000:87:01.0/0000:89:00.0", 1),
}
BUS_IDS = ("00000000:18:00.0", "00000000:27:00.0", "00000000:88:00.0")


def build(sysfs: Path) -> None:
    for name, (way, node) in WAYS.items():
        directory = sysfs / "devices" / way
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{node}\n")
        (directory / "local_cpulist").write_text("0-31\n" if node == 0 else "32-63\n")
        link(sysfs / "bus/pci/devices" / directory.name, directory)
        if name.startswith("mlx5"):
            port = directory / "infiniband" / name / "ports" / "1"
            port.mkdir(parents=True)
            for file, text in (
                ("state", "4: ACTIVE\n"),
                ("rate", "400 Gb/sec (4X NDR)\n"),
                ("link_layer", "InfiniBand\n"),
            ):
                (port / file).write_text(text)
            link(directory / "infiniband" / name / "device", directory)
            link(sysfs / "class/infiniband" / name, directory / "infiniband" / name)
    for node in (0, 1):
        (sysfs / f"devices/system/node/node{node}").mkdir(parents=True)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.fixture
def node(context, sysfs):
    build(sysfs)
    context.inventory.gpus = tuple(
        GpuInfo(index=index, uuid=f"GPU-{index}", name="NVIDIA H100", pci_bus_id=bus)
        for index, bus in enumerate(BUS_IDS)
    )
    return context


@pytest.fixture
def distances(series):
    def of(collector: TopologyCollector, prefix: str, key: str) -> dict[str, str]:
        """Return the class by device."""
        found = {}
        for sample in collector.collect(1).samples:
            if sample.name == prefix and sample.labels.get(key.partition("=")[0]) == key[-1]:
                found[sample.labels.get("device") or sample.labels["peer"]] = sample.labels["class"]
        return found

    return of


def test_distances_are_named_as_nvidia_smi_does(node, distances):
    collector = TopologyCollector(node)
    metric = "paceline_gpu_nic_distance"
    assert distances(collector, metric, "gpu=0") == {
        "mlx5_0": "PIX", "mlx5_1": "PXB", "mlx5_2": "PHB", "mlx5_3": "SYS",
    }  # fmt: skip
    assert distances(collector, metric, "gpu=1") == {
        "mlx5_0": "NODE", "mlx5_1": "NODE", "mlx5_2": "NODE", "mlx5_3": "SYS",
    }  # fmt: skip
    assert distances(collector, metric, "gpu=2")["mlx5_3"] == "PIX"
    assert distances(collector, "paceline_gpu_gpu_distance", "gpu=0") == {"1": "NODE", "2": "SYS"}


def with_links(context, *links: dict[str, int]) -> TopologyCollector:
    context.inventory.gpus = tuple(
        msgspec.structs.replace(gpu, nvlinks=ends)
        for gpu, ends in zip(context.inventory.gpus, links, strict=True)
    )
    return TopologyCollector(context)


def test_links_are_nearer_than_any_way_over_pci(node, distances, series):
    collector = with_links(node, {"switch": 18}, {"switch": 17}, {})
    metric = "paceline_gpu_gpu_distance"
    assert distances(collector, metric, "gpu=0") == {"1": "NV17", "2": "SYS"}
    collector = with_links(node, {BUS_IDS[2]: 4, "cpu": 2}, {}, {BUS_IDS[0]: 4, BUS_IDS[1]: 1})
    assert distances(collector, metric, "gpu=0") == {"1": "NODE", "2": "NV4"}
    assert distances(collector, metric, "gpu=1") == {"2": "SYS"}, "one end alone is up"
    assert series(collector.collect(1))["paceline_gpu_gpu_distance{class=NV4,gpu=0,peer=2}"] == 5


def test_links_need_no_place_on_pci(context, series):
    context.inventory.gpus = tuple(
        GpuInfo(index, f"GPU-{index}", "B200", BUS_IDS[index], nvlinks={"switch": 18})
        for index in range(2)
    )
    found = series(TopologyCollector(context).collect(1))
    assert found == {"paceline_gpu_gpu_distance{class=NV18,gpu=0,peer=1}": 5}


def test_the_nearest(node, series):
    found = series(TopologyCollector(node).collect(1))
    nearest = [name for name in found if name.startswith("paceline_gpu_nearest_nic")]
    assert "paceline_gpu_nearest_nic{class=PIX,device=mlx5_0,gpu=0}" in nearest
    assert "paceline_gpu_nearest_nic{class=PIX,device=mlx5_3,gpu=2}" in nearest
    assert sum("gpu=1" in name for name in nearest) == 3
    assert found["paceline_gpu_nic_distance{class=SYS,device=mlx5_3,gpu=0}"] == 50
    affinity = "paceline_device_affinity_info{cpus=0-31,device=mlx5_0,kind=rdma,numa_node=0,"
    assert f"{affinity}pci_bus_id=0000:19:00.0}}" in found


def test_what_the_firmware_leaves_open_is_absent(node, sysfs, series):
    for way, _ in WAYS.values():
        (sysfs / "devices" / way / "numa_node").write_text("-1\n")
    found = series(TopologyCollector(node).collect(1))
    assert "paceline_gpu_nic_distance{class=PIX,device=mlx5_0,gpu=0}" in found
    assert not any("device=mlx5_3,gpu=0" in name for name in found)  # either NODE or SYS


def rank_of(node, write, settings: str, gpu: int = 0) -> TopologyCollector:
    write(node.procfs_root, {"70/environ": settings})
    ranks = [
        LocalRank(job="j", generation=0, rank=5, local_rank=0, pid=70, gpu_uuid=f"GPU-{gpu}"),
        LocalRank(job="j", generation=0, rank=6, local_rank=1, pid=71, gpu_uuid="GPU-unknown"),
    ]
    return TopologyCollector(dataclasses.replace(node, local_ranks=lambda: ranks))


@pytest.mark.parametrize(
    ("settings", "gpu", "nics", "misplaced"),
    [
        ("A=1\0", 0, {"mlx5_0": "PIX"}, 0),
        ("NCCL_IB_HCA=mlx5\0", 2, {"mlx5_3": "PIX"}, 0),
        ("NCCL_IB_HCA==mlx5_2:1,mlx5_3:1\0", 0, {"mlx5_2": "PHB"}, 1),
        ("NCCL_IB_HCA=mlx5_3\0", 0, {"mlx5_3": "SYS"}, 1),
        ("NCCL_IB_HCA=^mlx5_3\0", 1, {f"mlx5_{n}": "NODE" for n in range(3)}, 0),
        ("NCCL_IB_HCA=^mlx5_3\0", 2, {f"mlx5_{n}": "SYS" for n in range(3)}, 1),
    ],
)
def test_the_nic_of_a_rank(node, write, series, distances, settings, gpu, nics, misplaced):
    collector = rank_of(node, write, settings, gpu)
    assert distances(collector, "paceline_rank_nic_distance", "rank=5") == nics
    found = series(collector.collect(2))
    assert found["paceline_rank_nic_misplaced{job=j,rank=5}"] == misplaced
    assert not any("rank=6" in name for name in found)


@pytest.mark.parametrize(
    ("file", "text"),
    [("state", "1: DOWN\n"), ("rate", "100 Gb/sec (4X EDR)\n"), ("link_layer", "Ethernet\n")],
)
def test_a_nearer_nic_that_is_not_like_it_does_not_count(node, sysfs, write, series, file, text):
    """The management port next to the GPU is not the NIC that the rank should use."""
    (sysfs / "class/infiniband/mlx5_0/ports/1" / file).write_text(text)
    found = series(rank_of(node, write, "NCCL_IB_HCA==mlx5_1\0").collect(1))
    assert found["paceline_rank_nic_misplaced{job=j,rank=5}"] == 0


def test_a_card_is_as_able_as_its_port_that_is_up(node, sysfs, write, series):
    """The device has two ports; the first has no cable."""
    ports = sysfs / "class/infiniband/mlx5_0/ports"
    (ports / "1").rename(ports / "2")
    write(ports, {"1/state": "1: DOWN\n", "1/rate": "10 Gb/sec (4X SDR)\n"})
    found = series(rank_of(node, write, "NCCL_IB_HCA==mlx5_1\0").collect(1))
    assert found["paceline_rank_nic_misplaced{job=j,rank=5}"] == 1


def test_without_pci_it_is_unavailable(context, infiniband):
    with pytest.raises(CollectorUnavailable):
        TopologyCollector(context).collect(1)
