"""GPU facts from the agent's NVML collector, which runs in its own process.

A call on a faulty GPU can block for minutes where no signal reaches it. The other facts of the node
are still collected, and the hang is reported as the result.
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
from paceline_wire import metric_names
from paceline_wire.batch import Sample

_PATIENCE_SECONDS = 60.0
_END_SECONDS = 2.0

# metric of the collector -> field of a GPU
_FIELD_OF = {
    metric_names.GPU_SM_CLOCK_MAX_MHZ: "sm_clock_max_mhz",
    metric_names.GPU_MEMORY_CLOCK_MAX_MHZ: "memory_clock_max_mhz",
    metric_names.GPU_ENFORCED_POWER_LIMIT: "power_limit_watts",
    metric_names.GPU_FB_TOTAL: "memory_total_mebibytes",
    metric_names.GPU_FB_USED: "memory_used_mebibytes",
    metric_names.GPU_UTIL: "utilization_percent",
    metric_names.GPU_TEMP: "temperature_celsius",
    metric_names.GPU_PCIE_WIDTH: "pcie_width",
    metric_names.GPU_PCIE_WIDTH_MAX: "pcie_width_max",
    metric_names.GPU_PCIE_GENERATION_MAX: "pcie_generation_max",
    metric_names.GPU_NVLINK_ACTIVE_LINKS: "nvlinks_active",
    metric_names.GPU_ECC_DBE_VOL_TOTAL: "ecc_uncorrected_volatile",
    metric_names.GPU_UNCORRECTABLE_REMAPPED_ROWS: "remapped_rows_uncorrectable",
    metric_names.GPU_ROW_REMAP_PENDING: "remap_pending",
    metric_names.GPU_ROW_REMAP_FAILURE: "remap_failure",
    metric_names.GPU_ECC_CURRENT: "ecc_mode",
    metric_names.MIG_MODE: "mig_mode",
    metric_names.GPU_PERSISTENCE_MODE: "persistence_mode",
}
_TROUBLES = {metric_names.GPU_LOST: "is lost", metric_names.GPU_HUNG: "does not answer"}
_VERSIONS = {
    "driver_version": "driver",
    "cuda_version": "cuda driver",
}


class GpuFacts(msgspec.Struct, frozen=True):
    gpus: list[PreflightGpu] = []
    versions: dict[str, str] = {}
    absence: str | None = None  # why there are no GPUs: no driver
    problem: str | None = None  # why the GPUs do not respond


_decoder = msgspec.json.Decoder(GpuFacts)


def read_apart(sysfs_root: Path, patience_seconds: float = _PATIENCE_SECONDS) -> GpuFacts:
    """Run `read` in a child process, which is abandoned if it does not respond."""
    command = [sys.executable, "-P", "-m", "paceline_cli.preflight.gpu_facts", str(sysfs_root)]
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
    """Kill the child without waiting long: a call in the driver may not return."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_SECONDS)


def read(sysfs_root: Path) -> GpuFacts:
    """Return the GPUs; the process must end afterwards."""
    collector = NvmlCollector(Context(node_directory=Path("/nonexistent"), sysfs_root=sysfs_root))
    try:
        collected = collector.collect(time.time_ns())
    except CollectorUnavailable as error:
        return GpuFacts(absence=str(error))
    # The library is not closed: another call may still hang in the driver.
    return from_samples(collected.everything(), sysfs_root)


def from_samples(samples: list[Sample], sysfs_root: Path) -> GpuFacts:
    fields: dict[int, dict[str, object]] = defaultdict(dict)
    throttled: dict[int, list[str]] = defaultdict(list)
    versions: dict[str, str] = {}
    for sample in samples:
        if sample.name == metric_names.DRIVER_INFO:
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
        elif sample.name == metric_names.GPU_INFO:
            fields[index]["vbios"] = sample.labels.get("vbios_version")
        elif sample.name == metric_names.GPU_THROTTLE_REASON and sample.value:
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
    fields = {"index": index, "throttle_reasons": throttled, **known, **place}
    return msgspec.convert(fields, PreflightGpu)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(read(Path(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for a thread that hangs in the driver
