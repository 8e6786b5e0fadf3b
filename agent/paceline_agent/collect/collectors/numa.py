"""NUMA node of each GPU, NIC, RDMA device and rank, and the allocations of each node.

A rank without CPUs on the NUMA node of its GPU pays for every copy across the socket link, and so
does a rank that may not allocate memory there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, entries, read_text_once
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    LocalRank,
    Metric,
)
from paceline_agent.collect.cpu_lists import parse_cpu_list
from paceline_agent.collect.pci_topology import cards_first, sysfs_address
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric("node_memory_numa_*_total", "counter", None, "Of numastat."),
    Metric("paceline_device_numa_node", "gauge", None, "NUMA node of a device."),
    Metric(
        "paceline_rank_numa_node",
        "gauge",
        None,
        "The one NUMA node whose CPUs the rank may use.",
    ),
    Metric(
        metric_names.RANK_NUMA_MISBOUND,
        "gauge",
        None,
        "1: none of the rank's CPUs is on its GPU's node.",
    ),
    Metric(
        "paceline_rank_affinity_info",
        "info",
        None,
        "CPUs the rank may run on, NUMA nodes it may have memory on.",
    ),
    Metric(
        "paceline_rank_memory_policy_info",
        "info",
        None,
        "NUMA memory policy of the rank's process.",
    ),
    Metric(
        metric_names.RANK_MEMORY_MISBOUND,
        "gauge",
        None,
        "1: the rank may not have memory on its GPU's NUMA node.",
    ),
    Metric(
        "paceline_rank_numa_sampled_bytes",
        "gauge",
        "bytes",
        "Where the rank's first mappings (program, heap) are in memory.",
    ),
    Metric(
        "node_memory_numa_*",
        "gauge",
        None,
        "Of a NUMA node's meminfo, in bytes where it has a unit.",
    ),
)

_CLASSES = {"net": "nic", "infiniband": "rdma"}
_MEMORY = {"MemTotal", "MemFree", "FilePages", "AnonPages", "HugePages_Total", "HugePages_Free"}
_MEMORY_LINE = re.compile(r"^Node \d+ (\w+):\s+([0-9]{1,20})( kB)?$", re.MULTILINE)
_DEVICES_AT_MOST = 64
_DIGITS = 20  # digits of a 64-bit number
# The kernel walks the pages of a mapping to write its line, and blocks the process's own mmap calls
# meanwhile. The first mappings (program, heap) show the policy; the others are not read.
_MAPS_BYTES = 8192
_MAPS_EVERY_NS = 60 * 10**9
_POLICY = re.compile(  # mm/mempolicy.c, mpol_to_str
    r"[0-9a-f]+ (?P<name>default|local|bind|prefer \(many\)|prefer|(?:weighted )?interleave)"
    r"(?:=[a-z|]+)?(?::(?P<nodes>[0-9,-]+))?(?: |$)"
)
_PAGES = re.compile(r"\bN([0-9]{1,5})=([0-9]{1,20})")
_PAGE_SIZE = re.compile(r"\bkernelpagesize_kB=([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class MemoryMaps:
    """Memory policy and resident memory of the mappings that were read."""

    policy: str  # "default", "bind", "prefer", "interleave", ...
    nodes: str  # NUMA nodes of the policy; may be empty
    resident_bytes: dict[int, int] = field(default_factory=dict)  # by node


class NumaCollector(Collector):
    name: ClassVar[str] = "numa"
    interval_seconds: ClassVar[float] = 10.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True)
        self._nodes = context.sysfs_root / "devices" / "system" / "node"
        self._maps: dict[
            int, tuple[int, MemoryMaps | None]
        ] = {}  # by pid: time of the read, result

    def collect(self, now_ns: int) -> Collected:
        cpus = {node: self._cpus(node, now_ns) for node in self._node_numbers()}
        if not cpus:
            raise CollectorUnavailable(f"no NUMA nodes in {self._nodes}")
        gpu_nodes = {
            gpu.index: self._pci_node(gpu.pci_bus_id, now_ns) for gpu in self.context.inventory.gpus
        }
        samples = list(self._statistics(cpus, now_ns))
        samples += self._devices(gpu_nodes, now_ns)
        ranks = self.context.local_ranks()
        for pid in self._maps.keys() - {rank.pid for rank in ranks}:
            del self._maps[pid]
        for rank in ranks:
            samples += self._rank(rank, cpus, gpu_nodes, now_ns)
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()

    def _node_numbers(self) -> list[int]:
        names = [name.removeprefix("node") for name in entries(self._nodes)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _cpus(self, node: int, now_ns: int) -> frozenset[int]:
        return parse_cpu_list(
            self._files.read_text(self._nodes / f"node{node}" / "cpulist", now_ns) or ""
        )

    def _statistics(self, nodes: dict[int, frozenset[int]], now_ns: int) -> Iterator[Sample]:
        for node in nodes:
            labels = {"node": str(node)}
            text = self._files.read_text(self._nodes / f"node{node}" / "numastat", now_ns) or ""
            for line in text.splitlines():
                name, _, value = line.partition(" ")
                if value.isdecimal() and len(value) <= _DIGITS:
                    metric = f"node_memory_numa_{name}_total"
                    yield Sample(metric, labels, float(value), now_ns)
            text = self._files.read_text(self._nodes / f"node{node}" / "meminfo", now_ns) or ""
            for name, number, unit in _MEMORY_LINE.findall(text):
                if name in _MEMORY:
                    amount = float(number) * (1024 if unit else 1)
                    yield Sample(f"node_memory_numa_{name}", labels, amount, now_ns)

    def _devices(self, gpu_nodes: dict[int, int | None], now_ns: int) -> Iterator[Sample]:
        for index, node in gpu_nodes.items():
            yield from _device_sample(f"gpu{index}", "gpu", node, now_ns)
        for class_name, kind in _CLASSES.items():
            directory = self.context.sysfs_root / "class" / class_name
            for device in cards_first(directory, entries(directory))[:_DEVICES_AT_MOST]:
                if self.context.excludes_rdma(device):
                    continue
                node = self._read_node(directory / device / "device" / "numa_node", now_ns)
                yield from _device_sample(device, kind, node, now_ns)

    def _pci_node(self, pci_bus_id: str, now_ns: int) -> int | None:
        directory = self.context.sysfs_root / "bus" / "pci" / "devices"
        return self._read_node(directory / sysfs_address(pci_bus_id) / "numa_node", now_ns)

    def _read_node(self, path: Path, now_ns: int) -> int | None:
        node = self._files.read_number(path, now_ns)
        return node if node is not None and node >= 0 else None  # -1: not reported by the firmware

    def _rank(
        self,
        rank: LocalRank,
        cpus: dict[int, frozenset[int]],
        gpu_nodes: dict[int, int | None],
        now_ns: int,
    ) -> Iterator[Sample]:
        status = process_lists(self.context.procfs_root, rank.pid)
        allowed = parse_cpu_list(status.get("Cpus_allowed_list", ""))
        if not allowed:
            return
        labels = {"job": rank.job, "rank": str(rank.rank)}
        lists = {
            "cpus": status["Cpus_allowed_list"],
            "memory_nodes": status.get("Mems_allowed_list", ""),
        }
        yield Sample("paceline_rank_affinity_info", {**labels, **lists}, 1.0, now_ns)
        on = [node for node, node_cpus in cpus.items() if node_cpus & allowed]
        if len(on) == 1:
            yield Sample("paceline_rank_numa_node", labels, float(on[0]), now_ns)
        maps = self._memory_maps(rank.pid, now_ns)
        if maps is not None:
            policy = {"policy": maps.policy, "nodes": maps.nodes}
            yield Sample("paceline_rank_memory_policy_info", {**labels, **policy}, 1.0, now_ns)
            for node, resident in maps.resident_bytes.items():
                metric = "paceline_rank_numa_sampled_bytes"
                yield Sample(metric, {**labels, "node": str(node)}, float(resident), now_ns)
        gpu = self.context.gpu_of(rank)
        gpu_node = None if gpu is None else gpu_nodes.get(gpu.index)
        if gpu_node is None or not cpus.get(gpu_node):
            return
        misbound = float(not allowed & cpus[gpu_node])
        yield Sample(metric_names.RANK_NUMA_MISBOUND, labels, misbound, now_ns)
        nodes = parse_cpu_list(lists["memory_nodes"])
        if maps is not None and maps.nodes:
            nodes = parse_cpu_list(maps.nodes)
        if nodes:
            memory_misbound = float(gpu_node not in nodes)
            yield Sample(metric_names.RANK_MEMORY_MISBOUND, labels, memory_misbound, now_ns)

    def _memory_maps(self, pid: int, now_ns: int) -> MemoryMaps | None:
        read_ns, known = self._maps.get(pid, (0, None))
        if known is None or not 0 <= now_ns - read_ns < _MAPS_EVERY_NS:
            known = read_memory_maps(self.context.procfs_root, pid)
            self._maps[pid] = now_ns, known
        return known


def _device_sample(device: str, kind: str, node: int | None, now_ns: int) -> Iterator[Sample]:
    if node is not None:
        labels = {"device": device, "kind": kind}
        yield Sample("paceline_device_numa_node", labels, float(node), now_ns)


def process_lists(procfs_root: Path, pid: int) -> dict[str, str]:
    """Return `Cpus_allowed_list` and `Mems_allowed_list`; empty if the process is gone."""
    try:
        status = read_text_once(procfs_root / str(pid) / "status")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in pairs if name.endswith("_allowed_list")}


def read_memory_maps(procfs_root: Path, pid: int) -> MemoryMaps | None:
    """Return the maps; None if the process is gone or not accessible, or the kernel has no NUMA."""
    try:
        lines = read_text_once(procfs_root / str(pid) / "numa_maps", _MAPS_BYTES).splitlines()
    except OSError:
        return None
    policies: Counter[tuple[str, str]] = Counter()
    resident: Counter[int] = Counter()
    for line in lines:
        policy = _POLICY.match(line)
        if policy is None:  # truncated line
            continue
        policies[policy["name"], policy["nodes"] or ""] += 1
        size = _PAGE_SIZE.search(line)
        for node, pages in _PAGES.findall(line):
            resident[int(node)] += int(pages) * (int(size[1]) if size else 4) * 1024
    if not policies:
        return None
    (name, nodes), _ = policies.most_common(1)[0]
    return MemoryMaps(name, nodes, dict(resident))
