"""Which processes compute on a GPU, and which ranks they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline_agent.collectors.contract import LocalRank
from paceline_agent.nvml.driver import pynvml
from paceline_agent.nvml.gpu import Gpu, Value

_PROCESSES_AT_MOST = 32  # of one GPU: those that use most
_GENERATIONS = 8  # between a process and the rank it belongs to


def _processes(handle: Any) -> list[Any]:
    found: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return found


def read(gpu: Gpu, ranks: Sequence[LocalRank], procfs_root: Path) -> Iterator[Value]:
    """A process of no rank (a leftover, another user's) is shown all the same."""
    processes = gpu.ask(_processes)
    if processes is None:
        return
    used_bytes: dict[int, int] = {}
    for process in processes:  # one of several MIG instances is listed for each
        used_bytes[process.pid] = used_bytes.get(process.pid, 0) + (process.usedGpuMemory or 0)
    by_pid = {rank.pid: rank for rank in ranks}
    largest = sorted(used_bytes, key=used_bytes.__getitem__, reverse=True)[:_PROCESSES_AT_MOST]
    yield Value("paceline_gpu_processes", len(used_bytes))
    for pid in largest:
        own = (("pid", str(pid)),)
        if used_bytes[pid]:
            yield Value("paceline_gpu_process_memory_bytes", used_bytes[pid], own)
        rank = _rank_of(pid, by_pid, procfs_root)
        if rank is not None:
            labels = (("job", rank.job), ("rank", str(rank.rank)), *own)
            yield Value("paceline_gpu_process_info", 1.0, labels)


def _rank_of(pid: int, by_pid: dict[int, LocalRank], procfs_root: Path) -> LocalRank | None:
    """The rank a process is, or descends from."""
    for _ in range(_GENERATIONS):
        if pid in by_pid:
            return by_pid[pid]
        if pid <= 1 or not by_pid:
            return None
        try:
            stat = (procfs_root / str(pid) / "stat").read_bytes()
            pid = int(stat[stat.rindex(b")") + 2 :].split()[1])
        except (OSError, ValueError, IndexError):  # gone, or in another PID namespace
            return None
    return None
