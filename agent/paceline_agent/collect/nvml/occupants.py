"""Processes that compute on a GPU, their ranks, and how much of the GPU others take from a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.nvml.driver import pynvml
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value
from paceline_agent.collect.rank_processes import rank_of
from paceline_wire import metric_names

_PROCESSES_AT_MOST = 32  # per GPU: those with the most memory


def _processes(handle: Any) -> list[Any]:
    found: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return found


class Occupants:
    """The processes on one GPU, valid until the driver is initialized again."""

    def __init__(self) -> None:
        self.used_bytes: dict[int, int] = {}  # by pid
        self._ranks: dict[int, LocalRank] = {}  # by the pid of the process that the driver lists
        self._seen_us = 0  # newest sample of the processes' utilization

    def read(self, gpu: NvmlGpu, ranks: Sequence[LocalRank], procfs_root: Path) -> Iterator[Value]:
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
        found: dict[int, LocalRank] = {}
        yield Value("paceline_gpu_processes", len(used_bytes))
        for pid in largest:
            own = (("pid", str(pid)),)
            if used_bytes[pid]:
                yield Value("paceline_gpu_process_memory_bytes", used_bytes[pid], own)
            rank = rank_of(pid, by_pid, procfs_root)
            if rank is not None:
                found[pid] = rank
                rank_bytes[rank.pid] = rank_bytes.get(rank.pid, 0) + used_bytes[pid]
                labels = (("job", rank.job), ("rank", str(rank.rank)), *own)
                yield Value("paceline_gpu_process_info", 1.0, labels)
        gpu.rank_bytes = rank_bytes
        self.used_bytes = {pid: used_bytes[pid] for pid in largest}
        self._ranks = found

    def shared(self, gpu: NvmlGpu, gpus: Iterable[NvmlGpu]) -> Iterator[Value]:
        """Yield, for each rank on the GPU, the processes of others and how much each side uses.

        Other ranks of its job do not count. The instances of a GPU in MIG mode share no
        multiprocessors.
        """
        others = [other for other in gpus if other is not gpu and other.is_ours]
        if gpu.mig_mode or any(each.occupants is None and not each.trouble for each in others):
            return  # those of a GPU that was not read yet may have most of their memory there
        on_others = [each.occupants.used_bytes for each in others if each.occupants is not None]
        computing = [pid for pid in self.used_bytes if self._computes_here(pid, on_others)]
        ranks = {(r.job, r.rank): r for pid in computing if (r := self._ranks.get(pid)) is not None}
        percents = self._percents(gpu) if len(computing) > 1 and ranks else None
        for rank in ranks.values():
            foreign = [pid for pid in computing if not self._is_of_job(pid, rank.job)]
            labels = (("job", rank.job), ("rank", str(rank.rank)))
            yield Value(metric_names.RANK_GPU_OTHER_PROCESSES, len(foreign), labels)
            if percents is None:
                continue
            own = [pid for pid in computing if self._ranks.get(pid) == rank]
            yield Value(metric_names.RANK_GPU_UTILIZATION_RATIO, _ratio(own, percents), labels)
            if foreign:
                ratio = _ratio(foreign, percents)
                yield Value(metric_names.RANK_GPU_OTHERS_UTILIZATION_RATIO, ratio, labels)

    def _is_of_job(self, pid: int, job: str) -> bool:
        rank = self._ranks.get(pid)
        return rank is not None and rank.job == job

    def _computes_here(self, pid: int, on_others: Iterable[Mapping[int, int]]) -> bool:
        """Return whether no other GPU has more memory of the process.

        Processes often also use a little memory on the first GPU of the node.
        """
        return all(self.used_bytes[pid] >= used.get(pid, 0) for used in on_others)

    def _percents(self, gpu: NvmlGpu) -> dict[int, float] | None:
        found: dict[int, float] | None = gpu.ask(self._utilization)
        return found

    def _utilization(self, handle: Any) -> dict[int, float]:
        """Return the share of time of each process since the last call; others used nothing."""
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us)
        except pynvml.NVMLError_NotFound:
            return {}
        by_pid: dict[int, list[float]] = {}
        for sample in samples:
            self._seen_us = max(self._seen_us, sample.timeStamp)
            by_pid.setdefault(sample.pid, []).append(sample.smUtil)
        return {pid: sum(percents) / len(percents) for pid, percents in by_pid.items()}


def _ratio(pids: Iterable[int], percents: Mapping[int, float]) -> float:
    return min(sum(percents.get(pid, 0.0) for pid in pids) / 100, 1.0)


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
