"""Clock, limits, shared memory, CPUs and checkpoint paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline_cli import render
from paceline_cli.preflight.facts import CheckpointPath, NodeFacts
from paceline_cli.preflight.verdict import Check, equal, faults, skipped

_CLOCK_ERROR_SECONDS = 0.1  # a larger clock difference prevents comparing events of two nodes
_FILES_AT_LEAST = 65_536  # enough for sockets, libraries and data shards of eight ranks
_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_SHM_AT_LEAST_BYTES = _GIBIBYTE  # NCCL and data loaders fail with a container's default of 64 MiB
_FREE_AT_LEAST = 0.1
_SLOW_RATIO = 0.5
_GOVERNORS = {"performance", "schedutil"}


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    yield _clock(nodes)
    yield _open_files(nodes)
    yield _locked_memory(nodes)
    yield _shared_memory(nodes)
    yield equal("CPUs", {n.node: n.cpu_count for n in nodes}, "look at cgroups and offline CPUs")
    memory = {n.node: _gibibytes(n.memory_bytes) for n in nodes}
    yield equal("memory", memory, "look for a module that is gone: edac-util", unit=" GiB")
    yield _governors(nodes)
    yield _numa_balancing(nodes)
    yield from _checkpoints(nodes)


def _clock(nodes: Sequence[NodeFacts]) -> Check:
    if all(node.clock_synchronised is None for node in nodes):
        return skipped("clock", "the kernel does not say whether it is synchronized")
    found: dict[str, list[str]] = {node.node: [] for node in nodes}
    for node in nodes:
        error = node.clock_error_seconds
        if node.clock_synchronised is False:
            found[node.node].append("not synchronized")
        elif error is not None and error > _CLOCK_ERROR_SECONDS:
            found[node.node].append(f"may be off by {error:.2g} s")
    fix = "start chronyd or systemd-timesyncd: chronyc tracking"
    return faults("clock", found, fix, "synchronized by the kernel's word", status="warn")


def _open_files(nodes: Sequence[NodeFacts]) -> Check:
    limits = {node.node: node.limits.get("nofile") for node in nodes}
    found = {
        node: [f"{limit} files"] if limit is not None and limit < _FILES_AT_LEAST else []
        for node, limit in limits.items()
    }
    fix = f"ulimit -n {_FILES_AT_LEAST} or more, in the job's own environment"
    return faults("open files", found, fix, f"at least {_FILES_AT_LEAST}", status="warn")


def _locked_memory(nodes: Sequence[NodeFacts]) -> Check:
    """Check the limit of locked memory: RDMA pins what it sends. Only with RDMA."""
    concerned = [node for node in nodes if node.rdma_ports and "memlock" in node.limits]
    if not concerned:
        return skipped("locked memory", "no node has RDMA devices")
    found = {
        node.node: [] if limit is None else [f"{limit // 1024} KiB"]
        for node in concerned
        for limit in (node.limits["memlock"],)
    }
    fix = "ulimit -l unlimited (limits.d, LimitMEMLOCK=infinity, or --ulimit memlock=-1)"
    return faults("locked memory", found, fix, "unlimited")


def _shared_memory(nodes: Sequence[NodeFacts]) -> Check:
    found: dict[str, list[str]] = {}
    for node in nodes:
        size, available = node.shm_size_bytes, node.shm_available_bytes
        found[node.node] = []
        if size is None:
            found[node.node].append("there is none")
        elif size < _SHM_AT_LEAST_BYTES:
            found[node.node].append(f"{size // _MEBIBYTE} MiB")
        elif available is not None and available < _SHM_AT_LEAST_BYTES:
            found[node.node].append(f"{available // _MEBIBYTE} MiB left")
    fix = "remount it larger, remove what was left there, or start containers with --shm-size"
    return faults("/dev/shm", found, fix, "at least 1 GiB free")


def _governors(nodes: Sequence[NodeFacts]) -> Check:
    if not any(node.cpu_governors for node in nodes):
        return skipped("CPU governor", "not to be had on any node")
    found = {node.node: sorted(set(node.cpu_governors) - _GOVERNORS) for node in nodes}
    fix = "cpupower frequency-set -g performance"
    return faults("CPU governor", found, fix, "performance or schedutil", status="warn")


def _numa_balancing(nodes: Sequence[NodeFacts]) -> Check:
    if all(node.numa_balancing is None for node in nodes):
        return skipped("NUMA balancing", "not to be had on any node")
    found = {node.node: ["on"] if node.numa_balancing else [] for node in nodes}
    fix = "sysctl kernel.numa_balancing=0"
    return faults("NUMA balancing", found, fix, "off", status="warn")


def _checkpoints(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    for path in dict.fromkeys(each.path for node in nodes for each in node.checkpoints):
        by_node = {n.node: each for n in nodes for each in n.checkpoints if each.path == path}
        found = {node: _path_wrong(each) for node, each in by_node.items()}
        space = min((each.available_bytes or 0 for each in by_node.values()), default=0)
        passed = f"writable, at least {space / _GIBIBYTE:.0f} GiB left"
        yield faults(f"checkpoint path {path}", found, "free space, or take another path", passed)
        kinds = {node: each.filesystem for node, each in by_node.items()}
        yield equal(f"filesystem of {path}", kinds, "mount it on all nodes")
        yield _write_speed(path, by_node)


def _path_wrong(path: CheckpointPath) -> list[str]:
    if path.problem is not None:
        return [path.problem]
    if path.size_bytes and path.available_bytes is not None:
        free = path.available_bytes / path.size_bytes
        if free < _FREE_AT_LEAST:
            return [f"{render.percent(free, 0)} free, {path.available_bytes / _GIBIBYTE:.1f} GiB"]
    return []


def _write_speed(path: str, by_node: dict[str, CheckpointPath]) -> Check:
    speeds = {n: p.write_bytes_per_second for n, p in by_node.items() if p.write_bytes_per_second}
    name = f"write speed of {path}"
    if not speeds:
        return skipped(name, "nothing could be written")
    best = max(speeds.values())
    found = {
        node: [f"{speed / _MEBIBYTE:.0f} MiB/s"] if speed < _SLOW_RATIO * best else []
        for node, speed in speeds.items()
    }
    fix = f"compare the node's mount and disk; others write {best / _MEBIBYTE:.0f} MiB/s"
    passed = f"{min(speeds.values()) / _MEBIBYTE:.0f} MiB/s or more, one synced file a node"
    return faults(name, found, fix, passed, status="warn")


def _gibibytes(size: int | None) -> float | None:
    """Return rounded memory sizes: kernels reserve slightly different amounts."""
    return None if size is None else float(round(size / _GIBIBYTE / 4) * 4)
