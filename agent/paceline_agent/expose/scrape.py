"""Values for dashboards only, read at each scrape: time of each CPU, uname, time of day.

node_exporter's stock dashboards average over CPUs, count them, and find nodes through
`node_uname_info`. The server does not need thousands of series of single CPUs, so they are not
collected every second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline_agent.collect.cached_files import read_text_once
from paceline_wire.batch import Sample

_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_GUEST_MODES = ("user", "nice")
_CPUS_AT_MOST = 1024
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CPU_SECONDS = "node_cpu_seconds_total"
_UNAME = {  # label of node_uname_info: file of sys/kernel
    "sysname": "ostype",
    "release": "osrelease",
    "version": "version",
    "nodename": "hostname",
    "domainname": "domainname",
    "machine": "arch",  # since Linux 6.1
}


def completed(samples: Iterable[Sample], procfs_root: Path) -> Iterator[Sample]:
    """Yield the collectors' samples and these values; the time of each CPU replaces the sum."""
    now_ns = time.time_ns()
    own = [*_cpus(procfs_root, now_ns), *_uname(procfs_root, now_ns)]
    if procfs_root == Path("/proc"):  # the time of a copied tree is unknown
        own.append(Sample("node_time_seconds", {}, now_ns / 1e9, now_ns))
    yield from own
    yield Sample("paceline_series", {"collector": "scrape"}, float(len(own)), now_ns)
    has_cpus = any(sample.name == _CPU_SECONDS for sample in own)
    for sample in samples:
        if not (has_cpus and sample.name == _CPU_SECONDS):
            yield sample


def _cpus(procfs_root: Path, now_ns: int) -> Iterator[Sample]:
    lines = _read(procfs_root / "stat").splitlines()
    for line in [line for line in lines if line.startswith("cpu")][: 1 + _CPUS_AT_MOST]:
        name, *ticks = line.split()
        cpu = name.removeprefix("cpu")
        if not cpu.isdecimal() or not all(each.isdecimal() for each in ticks):
            continue
        seconds = [int(each) / _TICKS_PER_SECOND for each in ticks]
        for mode, value in zip(_MODES, seconds, strict=False):
            yield Sample(_CPU_SECONDS, {"cpu": cpu, "mode": mode}, value, now_ns)
        for mode, value in zip(_GUEST_MODES, seconds[len(_MODES) :], strict=False):
            labels = {"cpu": cpu, "mode": mode}
            yield Sample("node_cpu_guest_seconds_total", labels, value, now_ns)


def _uname(procfs_root: Path, now_ns: int) -> Iterator[Sample]:
    labels = {
        label: _read(procfs_root / "sys" / "kernel" / file).strip()
        for label, file in _UNAME.items()
    }
    if not labels["nodename"]:
        return
    if not labels["machine"] and procfs_root == Path("/proc"):
        labels["machine"] = os.uname().machine
    yield Sample("node_uname_info", labels, 1.0, now_ns)


def _read(path: Path) -> str:
    try:
        return read_text_once(path)
    except OSError:
        return ""
