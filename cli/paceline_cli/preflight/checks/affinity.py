"""Checks of the PCI distance between each GPU and its nearest RDMA device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from paceline_agent.collect.pci_topology import Distance, PciDevice, distance
from paceline_cli.preflight.facts import NodeFacts, PreflightGpu, RdmaPort
from paceline_cli.preflight.verdict import Check, equal, faults, skipped

_NAME = "GPU to NIC"


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    nearest = {node.node: _nearest_of(node) for node in nodes}
    if not any(nearest.values()):
        yield skipped(_NAME, "no node has GPUs and RDMA devices whose places on PCIe are known")
        return
    found = {
        node: [f"GPU {index}: {near}" for index, near in classes.items() if near == "SYS"]
        for node, classes in nearest.items()
    }
    fix = "move the card, or put ACS, IOMMU and virtual topology right; check NCCL_IB_HCA"
    count = Counter(near for classes in nearest.values() for near in classes.values())
    passed = ", ".join(f"{count[near]} {near}" for near in Distance.__members__ if count[near])
    yield faults(_NAME, found, fix, passed, status="warn")
    ways = {node: tuple(classes.values()) or None for node, classes in nearest.items()}
    yield equal("GPU to NIC alike", ways, "compare the nodes' slots and BIOS settings")


def _nearest_of(node: NodeFacts) -> dict[int, str]:
    """Return the class of the path to the nearest RDMA device, by GPU, where it is known."""
    classes = {gpu.index: _nearest(gpu, node) for gpu in node.gpus}
    return {index: near.name for index, near in classes.items() if near is not None}


def _nearest(gpu: PreflightGpu, node: NodeFacts) -> Distance | None:
    here = _place(gpu)
    ways = [
        distance(here, there, node.numa_nodes or 0)
        for there in map(_place, node.rdma_ports)
        if here and there
    ]
    return min((way for way in ways if way is not None), default=None)


def _place(device: PreflightGpu | RdmaPort) -> PciDevice | None:
    if len(device.pci_path) < 2:  # at least a host bridge and the device
        return None
    return PciDevice(tuple(device.pci_path), device.numa_node, local_cpus="")
