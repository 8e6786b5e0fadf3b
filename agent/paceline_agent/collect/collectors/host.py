"""The host: CPU, load, memory, huge pages, swap, faults, pressure, disks, open files.

Names are node_exporter's; CPU time is summed over CPUs (`cpu="all"`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(metric_names.NODE_CONTEXT_SWITCHES_TOTAL, "counter", None, "Context switches."),
    Metric("node_procs_running", "gauge", None, "Tasks that run or could."),
    Metric("node_procs_blocked", "gauge", None, "Tasks that wait for I/O."),
    Metric(metric_names.NODE_LOAD1, "gauge", None, "Load average over 1 minute."),
    Metric("node_load5", "gauge", None, "Load average over 5 minutes."),
    Metric("node_load15", "gauge", None, "Load average over 15 minutes."),
    Metric("node_memory_*_bytes", "gauge", "bytes", "Of /proc/meminfo."),
    Metric("node_memory_*", "gauge", None, "Of /proc/meminfo."),
    Metric("node_vmstat_*", "unknown", None, "Of /proc/vmstat."),
    Metric(
        "node_pressure_*_seconds_total",
        "counter",
        "seconds",
        "Time in which tasks waited for the resource.",
    ),
    Metric("node_disk_*_bytes_total", "counter", "bytes", "Of /proc/diskstats."),
    Metric("node_disk_*_seconds_total", "counter", "seconds", "Of /proc/diskstats."),
    Metric("node_disk_*_total", "counter", None, "Of /proc/diskstats."),
    Metric("node_intr_total", "counter", None, "Interrupts."),
    Metric("node_forks_total", "counter", None, "Processes and threads made."),
    Metric("node_boot_time_seconds", "gauge", "seconds", "Unix time of the boot."),
    Metric("node_filefd_allocated", "gauge", None, "Open files of the node."),
    Metric("node_filefd_maximum", "gauge", None, "Open files there can be."),
    Metric("node_disk_io_now", "gauge", None, "I/O operations under way."),
)

_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_MEMORY = {
    "MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "Dirty", "Writeback", "Shmem",
    "Active", "Inactive", "AnonPages", "AnonHugePages", "Mapped", "Mlocked", "Unevictable", "Slab",
    "SReclaimable", "SUnreclaim", "KernelStack", "PageTables", "Committed_AS", "CommitLimit",
    "SwapTotal", "SwapFree", "SwapCached", "Hugepagesize", "HugePages_Total", "HugePages_Free",
    "HugePages_Rsvd", "HugePages_Surp",
}  # fmt: skip
_VMSTAT = {
    "pgfault", "pgmajfault", "pgpgin", "pgpgout", "pswpin", "pswpout", "oom_kill",
    "compact_stall", "thp_fault_alloc", "thp_fault_fallback",
}  # fmt: skip
_CPU_COUNTS = {
    "ctxt": metric_names.NODE_CONTEXT_SWITCHES_TOTAL,
    "intr": "node_intr_total",
    "processes": "node_forks_total",
    "btime": "node_boot_time_seconds",
    "procs_running": "node_procs_running",
    "procs_blocked": "node_procs_blocked",
}
_NOT_A_DISK = re.compile(r"^(loop|ram|zram|sr|fd)\d|^(sd|vd|xvd|hd)[a-z]+\d+$|^nvme\d+n\d+p\d+$")
_DISKS_AT_MOST = 32
_SECTOR_BYTES = 512  # unit of /proc/diskstats, independent of the device
_MILLISECOND = 1e-3
# larger: a negative number printed as unsigned (Committed_AS of old kernels)
_GREATEST = float(1 << 63)
_DISK_FIELDS = (  # Documentation/admin-guide/iostats.rst, after major, minor and name
    (3, "node_disk_reads_completed_total", 1),
    (5, "node_disk_read_bytes_total", _SECTOR_BYTES),
    (6, "node_disk_read_time_seconds_total", _MILLISECOND),
    (7, "node_disk_writes_completed_total", 1),
    (9, "node_disk_written_bytes_total", _SECTOR_BYTES),
    (10, "node_disk_write_time_seconds_total", _MILLISECOND),
    (11, "node_disk_io_now", 1),
    (12, metric_names.DISK_IO_TIME_SECONDS_TOTAL, _MILLISECOND),
    (13, metric_names.DISK_IO_TIME_WEIGHTED_SECONDS_TOTAL, _MILLISECOND),
)
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

Values = Iterator[tuple[str, dict[str, str], float]]
_NO_LABELS: dict[str, str] = {}


class HostCollector(Collector):
    name: ClassVar[str] = "host"
    interval_seconds: ClassVar[float] = 2.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True, bytes_at_most=1 << 18)  # /proc/stat: many CPUs

    def collect(self, now_ns: int) -> Collected:
        samples: list[Sample] = []
        for file, source in _SOURCES.items():
            text = self._files.read_text(self.context.procfs_root / file, now_ns)
            if text is None:  # such as pressure in kernels without PSI
                continue
            # A file with another format is left out; the other files are still read.
            with contextlib.suppress(ValueError, IndexError, OverflowError):
                for name, labels, value in source(text):
                    if 0 <= value <= _GREATEST:
                        samples.append(Sample(name, labels, value, now_ns))
        if not samples:
            raise CollectorUnavailable(f"{self.context.procfs_root} tells nothing of the host")
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()


def _cpu(text: str) -> Values:
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "cpu":
            for mode, ticks in zip(_MODES, rest.split(), strict=False):
                labels = {"cpu": "all", "mode": mode}
                yield "node_cpu_seconds_total", labels, int(ticks) / _TICKS_PER_SECOND
        elif name in _CPU_COUNTS:  # the rest of the `intr` line is one number per interrupt
            yield _CPU_COUNTS[name], _NO_LABELS, float(rest.partition(" ")[0])


def _load(text: str) -> Values:
    for minutes, value in zip((1, 5, 15), text.split(), strict=False):
        yield f"node_load{minutes}", _NO_LABELS, float(value)


def _memory(text: str) -> Values:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name not in _MEMORY:
            continue
        number, *unit = rest.split()
        if unit == ["kB"]:
            yield f"node_memory_{name}_bytes", _NO_LABELS, int(number) * 1024.0
        else:
            yield f"node_memory_{name}", _NO_LABELS, float(number)


def _vmstat(text: str) -> Values:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in _VMSTAT:
            yield f"node_vmstat_{name}", _NO_LABELS, float(value)


def _disks(text: str) -> Values:
    lines = [line.split() for line in text.splitlines()]
    disks = [fields for fields in lines if len(fields) >= 14 and not _NOT_A_DISK.match(fields[2])]
    for fields in disks[:_DISKS_AT_MOST]:
        labels = {"device": fields[2]}
        for position, metric, unit in _DISK_FIELDS:
            yield metric, labels, float(fields[position]) * unit


def _pressure(resource: str, text: str) -> Values:
    words = {"some": "waiting", "full": "stalled"}
    for line in text.splitlines():
        kind, *fields = line.split()
        totals = [field.removeprefix("total=") for field in fields if field.startswith("total=")]
        if totals and kind in words and not (resource == "cpu" and kind == "full"):
            metric = f"node_pressure_{resource}_{words[kind]}_seconds_total"
            yield metric, _NO_LABELS, int(totals[0]) / 1e6


def _open_files(text: str) -> Values:
    """Return the values of sys/fs/file-nr: allocated, unused, maximum."""
    allocated, _, maximum = text.split()
    yield "node_filefd_allocated", _NO_LABELS, float(allocated)
    yield "node_filefd_maximum", _NO_LABELS, float(maximum)


_SOURCES: dict[str, Callable[[str], Values]] = {
    "stat": _cpu,
    "loadavg": _load,
    "meminfo": _memory,
    "vmstat": _vmstat,
    "diskstats": _disks,
    "sys/fs/file-nr": _open_files,
    **{f"pressure/{each}": partial(_pressure, each) for each in ("cpu", "memory", "io", "irq")},
}
