"""Processes that compute on a GPU, and their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.nvml.driver import pynvml
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value
from paceline_agent.collect.rank_processes import rank_of

_PROCESSES_AT_MOST = 32  # per GPU: those with the most memory


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
        rank = rank_of(pid, by_pid, procfs_root)
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
