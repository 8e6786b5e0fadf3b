"""GPUs through the agent's NVML collector, in a process of its own.

A call on a sick GPU can block for minutes where no signal reaches it; then all the other facts
of the node are still to be had, and this is the finding.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from paceline_agent.collect.collectors.nvml import NvmlCollector
from paceline_agent.collect.contract import CollectorUnavailable, Context
from paceline_agent.collect.pci_topology import find_gpu
from paceline_cli.preflight.facts import PreflightGpu
from paceline_wire.batch import Sample

_PATIENCE_SECONDS = 60.0
_END_SECONDS = 2.0

# metric of the collector -> field of a GPU
_FIELD_OF = {
    "paceline_gpu_sm_clock_max_mhz": "sm_clock_max_mhz",
    "paceline_gpu_memory_clock_max_mhz": "memory_clock_max_mhz",
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": "power_limit_watts",
    "DCGM_FI_DEV_FB_TOTAL": "memory_total_mebibytes",
    "DCGM_FI_DEV_FB_USED": "memory_used_mebibytes",
    "DCGM_FI_DEV_GPU_UTIL": "utilization_percent",
    "DCGM_FI_DEV_GPU_TEMP": "temperature_celsius",
    "paceline_gpu_pcie_width": "pcie_width",
    "paceline_gpu_pcie_width_max": "pcie_width_max",
    "paceline_gpu_pcie_generation_max": "pcie_generation_max",
    "paceline_gpu_nvlink_active_links": "nvlinks_active",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "ecc_uncorrected_volatile",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "remapped_rows_uncorrectable",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "remap_pending",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "remap_failure",
    "DCGM_FI_DEV_ECC_CURRENT": "ecc_mode",
    "DCGM_FI_DEV_MIG_MODE": "mig_mode",
    "DCGM_FI_DEV_PERSISTENCE_MODE": "persistence_mode",
}
_TROUBLES = {"paceline_gpu_lost": "is lost", "paceline_gpu_hung": "does not answer"}
_VERSIONS = {
    "driver_version": "driver",
    "cuda_version": "cuda driver",
}


class GpuFacts(msgspec.Struct, frozen=True):
    gpus: list[PreflightGpu] = []
    versions: dict[str, str] = {}
    absence: str | None = None  # no driver
    problem: str | None = None  # no answer


_decoder = msgspec.json.Decoder(GpuFacts)


def read_apart(sysfs_root: Path, patience_seconds: float = _PATIENCE_SECONDS) -> GpuFacts:
    """`read` in a child process that is left behind if it does not answer."""
    command = [sys.executable, "-m", "paceline_cli.preflight.gpu_facts", str(sysfs_root)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            child.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            _leave_behind(child)
            problem = f"NVML did not answer within {patience_seconds:g} s: a sick GPU"
            return GpuFacts(problem=problem)
        output.seek(0)
        errors.seek(0)
        try:
            return _decoder.decode(output.read())
        except msgspec.DecodeError:
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            return GpuFacts(problem=f"NVML ended with status {child.returncode}: {last}")


def _leave_behind(child: subprocess.Popen[bytes]) -> None:
    """A call that blocks in the driver ends when the driver lets it: it is not waited for long."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_SECONDS)


def read(sysfs_root: Path) -> GpuFacts:
    """For a process that ends after it."""
    collector = NvmlCollector(Context(node_directory=Path("/nonexistent"), sysfs_root=sysfs_root))
    try:
        collected = collector.collect(time.time_ns())
    except CollectorUnavailable as error:
        return GpuFacts(absence=str(error))
    # Not closed: that would pull the driver away from below a call that hangs in it.
    return from_samples(collected.everything(), sysfs_root)


def from_samples(samples: list[Sample], sysfs_root: Path) -> GpuFacts:
    fields: dict[int, dict[str, object]] = defaultdict(dict)
    throttled: dict[int, list[str]] = defaultdict(list)
    versions: dict[str, str] = {}
    for sample in samples:
        if sample.name == "paceline_driver_info":
            labels = sample.labels
            versions = {ours: labels[name] for name, ours in _VERSIONS.items() if name in labels}
        if not sample.labels.get("gpu", "").isdecimal():
            continue
        index = int(sample.labels["gpu"])
        if sample.name in _TROUBLES:
            if sample.value:
                fields[index]["trouble"] = _TROUBLES[sample.name]
            else:
                fields[index].setdefault("trouble", None)
        elif sample.name == "paceline_gpu_info":
            fields[index]["vbios"] = sample.labels.get("vbios_version")
        elif sample.name == "paceline_gpu_throttle_reason" and sample.value:
            throttled[index].append(sample.labels["reason"])
        elif sample.name in _FIELD_OF:
            fields[index][_FIELD_OF[sample.name]] = sample.value
            fields[index] |= _identity(sample.labels)
    gpus = [
        _gpu(index, known, sorted(throttled[index]), sysfs_root)
        for index, known in sorted(fields.items())
    ]
    return GpuFacts(gpus=gpus, versions=versions)


def _identity(labels: dict[str, str]) -> dict[str, str]:
    named = {"modelName": "name", "UUID": "uuid", "pci_bus_id": "pci_bus_id"}
    return {ours: labels[label] for label, ours in named.items() if label in labels}


def _gpu(
    index: int, known: dict[str, object], throttled: list[str], sysfs_root: Path
) -> PreflightGpu:
    bus_id = known.get("pci_bus_id")
    device = find_gpu(sysfs_root, bus_id) if isinstance(bus_id, str) else None
    place = {"pci_path": device.way, "numa_node": device.numa_node} if device else {}
    told = {"index": index, "throttle_reasons": throttled, **known, **place}
    return msgspec.convert(told, PreflightGpu)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(read(Path(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in the driver may bring down an orderly end
