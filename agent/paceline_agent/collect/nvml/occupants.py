"""Processes that compute on a GPU, and their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_agent.collect.cached_files import read_once
from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.nvml.driver import pynvml
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value
from paceline_agent.collect.process_environment import read_environment
from paceline_agent.collect.processes import namespace_pids

_PROCESSES_AT_MOST = 32  # per GPU: those with the most memory
_GENERATIONS = 8  # most ancestors searched between a process and its rank


def _processes(handle: Any) -> list[Any]:
    found: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return found


def read(gpu: NvmlGpu, ranks: Sequence[LocalRank], procfs_root: Path) -> Iterator[Value]:
    """Yield the processes, also those that belong to no rank (a leftover, another user's)."""
    processes = gpu.ask(_processes)
    if processes is None:
        return
    used_bytes: dict[int, int] = {}
    for process in processes:  # a process on several MIG instances is listed for each
        used_bytes[process.pid] = used_bytes.get(process.pid, 0) + (process.usedGpuMemory or 0)
    by_pid = {rank.pid: rank for rank in ranks}
    largest = sorted(used_bytes, key=used_bytes.__getitem__, reverse=True)[:_PROCESSES_AT_MOST]
    rank_bytes: dict[int, int] = {}
    yield Value("paceline_gpu_processes", len(used_bytes))
    for pid in largest:
        own = (("pid", str(pid)),)
        if used_bytes[pid]:
            yield Value("paceline_gpu_process_memory_bytes", used_bytes[pid], own)
        rank = _rank_of(pid, by_pid, procfs_root)
        if rank is not None:
            rank_bytes[rank.pid] = rank_bytes.get(rank.pid, 0) + used_bytes[pid]
            labels = (("job", rank.job), ("rank", str(rank.rank)), *own)
            yield Value("paceline_gpu_process_info", 1.0, labels)
    gpu.rank_bytes = rank_bytes


def gpu_of_pid(gpus: Iterable[NvmlGpu]) -> dict[int, int]:
    """Return the index of the GPU on which each rank (by pid) has most memory.

    Ranks often also use a little memory on the first GPU of the node. If the driver does not report
    the amount, a rank on several GPUs is left out.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for gpu in gpus:
        for pid, used in gpu.rank_bytes.items():
            found.setdefault(pid, []).append((used, gpu.index))
    return {
        pid: max(places)[1] for pid, places in found.items() if len(places) == 1 or max(places)[0]
    }


def _rank_of(pid: int, by_pid: Mapping[int, LocalRank], procfs_root: Path) -> LocalRank | None:
    """Return the rank of a process or of its ancestors; `pid` is the node's pid."""
    at = pid
    for _ in range(_GENERATIONS):
        if at in by_pid:
            return by_pid[at]
        if at <= 1 or not by_pid:
            break
        try:
            stat = read_once(procfs_root / str(at) / "stat")
            at = int(stat[stat.rindex(b")") + 2 :].split()[1])
        except (OSError, ValueError, IndexError):  # gone, or in another PID namespace
            break
    return _rank_within(pid, by_pid, procfs_root)


def _rank_within(pid: int, by_pid: Mapping[int, LocalRank], procfs_root: Path) -> LocalRank | None:
    """Return the rank of a process in a container; another rank may have the same pid there."""
    for inner in namespace_pids(procfs_root, pid)[1:]:
        rank = by_pid.get(inner)
        if rank is not None:
            environment = read_environment(procfs_root, pid, ("RANK",)) or {}
            return rank if environment.get("RANK", str(rank.rank)) == str(rank.rank) else None
    return None
