"""Topology: distances between GPUs, NICs, CPUs and NUMA nodes, and the NIC of each rank.

Distances are those of `nvidia-smi topo -m`, from the PCI tree of sysfs; their values grow with the
distance (nvml.h, nvmlGpuTopologyLevel_t: PIX 10, PXB 20, PHB 30, NODE 40, SYS 50). GPUs connected
by NVLink have the number of links instead: NV18, with value 5. The NIC of a rank is the nearest one
that its NCCL settings allow, which is also NCCL's choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, entries
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    LocalRank,
    Metric,
)
from paceline_agent.collect.nccl.nic_choice import SETTINGS, allowed
from paceline_agent.collect.nvml.links import SWITCH
from paceline_agent.collect.pci_topology import (
    Distance,
    PciDevice,
    cards_first,
    distance,
    find,
    find_gpu,
    sysfs_address,
)
from paceline_agent.collect.process_environment import read_environment
from paceline_wire import metric_names
from paceline_wire.batch import GpuInfo, Sample

METRICS = (
    Metric(
        "paceline_device_affinity_info",
        "info",
        None,
        "Where a GPU or network device is: PCI address, NUMA node, the CPUs next to it.",
    ),
    Metric(
        "paceline_gpu_gpu_distance",
        "gauge",
        None,
        "Way between two GPUs, as nvidia-smi topo names it: NV# 5, else over PCI: PIX 10, "
        "PXB 20, PHB 30, NODE 40, SYS 50.",
    ),
    Metric(
        "paceline_gpu_nic_distance",
        "gauge",
        None,
        "Way from a GPU to a network device, likewise.",
    ),
    Metric("paceline_gpu_nearest_nic", "gauge", None, "1: no network device is nearer to the GPU."),
    Metric(
        "paceline_rank_nic_distance",
        "gauge",
        None,
        "Way from the rank's GPU to the network devices it has.",
    ),
    Metric(
        metric_names.RANK_NIC_MISPLACED,
        "gauge",
        None,
        "1: a like network device is nearer to the rank's GPU than those its NCCL settings allow.",
    ),
)

_DEVICES_AT_MOST = 64
_NICS_OF_A_RANK_AT_MOST = 4
_BY_NVLINK = 5.0  # nearer than any PCI distance
_ACTIVE = "4:"  # ib_verbs.h, IB_PORT_ACTIVE


@dataclass(frozen=True, slots=True)
class _Nic:
    name: str
    kind: str  # "rdma", "nic"
    pci: PciDevice
    ability: tuple[str, ...]  # link layer and rate; only NICs that are equal in both are compared
    is_up: bool


class TopologyCollector(Collector):
    name: ClassVar[str] = "topology"
    interval_seconds: ClassVar[float] = 30.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True)
        self._classes = context.sysfs_root / "class"
        self._nccl_settings: dict[tuple[str, int, int], dict[str, str]] = {}  # by rank

    def collect(self, now_ns: int) -> Collected:
        gpus: dict[int, PciDevice] = {}
        for gpu in self.context.inventory.gpus:
            found = find_gpu(self.context.sysfs_root, gpu.pci_bus_id)
            if found is not None:
                gpus[gpu.index] = found
        nics = [*self._rdma(now_ns), *self._network(now_ns)]
        samples = [_affinity(f"gpu{index}", "gpu", pci, now_ns) for index, pci in gpus.items()]
        samples += [_affinity(nic.name, nic.kind, nic.pci, now_ns) for nic in nics]
        samples += self._between_gpus(gpus, now_ns)
        samples += self._to_nics(gpus, _without_duplicates(nics), now_ns)
        samples += self._ranks(gpus, nics, now_ns)
        if not samples:
            raise CollectorUnavailable("no GPU or network device on PCI")
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()

    def _rdma(self, now_ns: int) -> Iterator[_Nic]:
        root = self._classes / "infiniband"
        for device in cards_first(root, entries(root))[:_DEVICES_AT_MOST]:
            if self.context.excludes_rdma(device):
                continue
            pci = find(root / device / "device")
            ports = [
                port
                for port in entries(root / device / "ports")
                if not self.context.excludes_rdma(f"{device}/{port}")
            ]
            if pci is None or not ports:
                continue

            def read(port: str, file: str, its: str = f"{device}/ports") -> str:
                return self._files.read_text(os.path.join(root, its, port, file), now_ns) or ""

            states = {port: read(port, "state") for port in ports}
            up = [port for port in ports if not states[port] or states[port].startswith(_ACTIVE)]
            port = (up or ports)[0]
            ability = (read(port, "link_layer"), read(port, "rate"))
            yield _Nic(device, "rdma", pci, ability, bool(up))

    def _network(self, now_ns: int) -> Iterator[_Nic]:
        root = self._classes / "net"
        for device in cards_first(root, entries(root))[:_DEVICES_AT_MOST]:
            pci = find(root / device / "device")
            if pci is not None:
                speed = self._files.read_text(root / device / "speed", now_ns) or ""
                state = self._files.read_text(root / device / "operstate", now_ns)
                yield _Nic(device, "nic", pci, (speed,), state != "down")

    def _numa_nodes(self) -> int:
        nodes = entries(self.context.sysfs_root / "devices" / "system" / "node")
        return sum(name[:4] == "node" and name[4:].isdecimal() for name in nodes)

    def _between_gpus(self, gpus: dict[int, PciDevice], now_ns: int) -> Iterator[Sample]:
        numa_nodes = self._numa_nodes()
        for gpu, peer in combinations(self.context.inventory.gpus, 2):
            name, far = "", 0.0
            if links := _nvlinks(gpu, peer):
                name, far = f"NV{links}", _BY_NVLINK
            elif gpu.index in gpus and peer.index in gpus:
                way = distance(gpus[gpu.index], gpus[peer.index], numa_nodes)
                name, far = (way.name, float(way)) if way is not None else ("", 0.0)
            if name:
                labels = {"gpu": str(gpu.index), "peer": str(peer.index), "class": name}
                yield Sample("paceline_gpu_gpu_distance", labels, far, now_ns)

    def _to_nics(
        self, gpus: dict[int, PciDevice], nics: Sequence[_Nic], now_ns: int
    ) -> Iterator[Sample]:
        numa_nodes = self._numa_nodes()
        for index, gpu in gpus.items():
            far = _distances(gpu, nics, numa_nodes)
            nearest = min(far.values(), default=None)
            for name, how_far in far.items():
                labels = {"gpu": str(index), "device": name, "class": how_far.name}
                yield Sample("paceline_gpu_nic_distance", labels, float(how_far), now_ns)
                if how_far == nearest:
                    yield Sample("paceline_gpu_nearest_nic", labels, 1.0, now_ns)

    def _ranks(
        self, gpus: dict[int, PciDevice], nics: Sequence[_Nic], now_ns: int
    ) -> Iterator[Sample]:
        ranks = self.context.local_ranks()
        self._nccl_settings = {key: self._settings(key) for key in map(_key, ranks)}
        numa_nodes = self._numa_nodes()
        for rank in ranks:
            gpu = self.context.gpu_of(rank)
            place = None if gpu is None else gpus.get(gpu.index)
            if place is None:
                continue
            kind, names = allowed(
                self._nccl_settings[_key(rank)],
                [nic.name for nic in nics if nic.kind == "rdma" and nic.is_up],
                [nic.name for nic in nics if nic.kind == "nic" and nic.is_up],
            )
            labels = {"job": rank.job, "rank": str(rank.rank)}
            yield from _nics_of_rank(labels, place, [n for n in nics if n.kind == kind], names,
                                numa_nodes, now_ns)  # fmt: skip

    def _settings(self, key: tuple[str, int, int]) -> dict[str, str]:
        known = self._nccl_settings.get(key)
        if known is not None:
            return known
        return read_environment(self.context.procfs_root, key[2], SETTINGS) or {}


def _nvlinks(gpu: GpuInfo, peer: GpuInfo) -> int:
    """Return the number of links between two GPUs, direct or through NVSwitches."""
    ends = {sysfs_address(end): links for end, links in gpu.nvlinks.items() if end != SWITCH}
    straight = ends.get(sysfs_address(peer.pci_bus_id), 0)
    return straight or min(gpu.nvlinks.get(SWITCH, 0), peer.nvlinks.get(SWITCH, 0))


def _key(rank: LocalRank) -> tuple[str, int, int]:
    return rank.job, rank.generation, rank.pid


def _affinity(device: str, kind: str, pci: PciDevice, now_ns: int) -> Sample:
    labels = {
        "device": device,
        "kind": kind,
        "pci_bus_id": pci.address,
        "numa_node": "" if pci.numa_node is None else str(pci.numa_node),
        "cpus": pci.local_cpus,
    }
    return Sample("paceline_device_affinity_info", labels, 1.0, now_ns)


def _without_duplicates(nics: Sequence[_Nic]) -> list[_Nic]:
    """Return the RDMA devices if there are any; their network devices are the same cards."""
    return [nic for nic in nics if nic.kind == "rdma"] or list(nics)


def _distances(gpu: PciDevice, nics: Sequence[_Nic], numa_nodes: int) -> dict[str, Distance]:
    found = {nic.name: distance(gpu, nic.pci, numa_nodes) for nic in nics}
    return {name: far for name, far in found.items() if far is not None}


def _nics_of_rank(
    labels: dict[str, str],
    gpu: PciDevice,
    nics: Sequence[_Nic],
    names: Sequence[str],
    numa_nodes: int,
    now_ns: int,
) -> Iterator[Sample]:
    """Return a rank's NICs, and whether it leaves an equally capable, nearer NIC unused."""
    far = _distances(gpu, nics, numa_nodes)
    own = {name: far[name] for name in names if name in far}
    if not own:
        return
    least = min(own.values())
    chosen = [name for name, how_far in own.items() if how_far == least]
    for name in chosen[:_NICS_OF_A_RANK_AT_MOST]:
        about = {**labels, "device": name, "class": least.name}
        yield Sample("paceline_rank_nic_distance", about, float(least), now_ns)
    abilities = {nic.ability for nic in nics if nic.name in chosen}
    like = [far[nic.name] for nic in nics if nic.name in far and nic.is_up
            and nic.ability in abilities]  # fmt: skip
    misplaced = float(min(like, default=least) < least)
    yield Sample(metric_names.RANK_NIC_MISPLACED, labels, misplaced, now_ns)
