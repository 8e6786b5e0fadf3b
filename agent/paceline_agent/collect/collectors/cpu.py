"""CPUs by class of core: their time, frequency and throttling.

A class is a kind of core that the kernel distinguishes: Intel's `performance` and `efficiency`
cores, ARM's cores by capacity; elsewhere all CPUs form one class. A series for each CPU would be
thousands on a large node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import fmean
from typing import ClassVar

from paceline_agent.collect.cached_files import CachedFiles, entries
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.cpu_lists import parse_cpu_list
from paceline_wire.batch import Sample

METRICS = (
    Metric("paceline_cpus", "gauge", None, "CPUs, by class of core."),
    Metric(
        "paceline_cpu_frequency_hertz",
        "gauge",
        "hertz",
        "Least, mean and greatest frequency of a class of cores.",
    ),
    Metric(
        "paceline_cpu_frequency_max_hertz",
        "gauge",
        "hertz",
        "Greatest frequency a class of cores could have.",
    ),
    Metric(
        "paceline_cpu_class_seconds_total",
        "counter",
        "seconds",
        "Time the CPUs of a class spent in each mode.",
    ),
    Metric(
        "paceline_cpu_core_throttles_total",
        "counter",
        None,
        "Times a core was throttled for heat, summed over a package.",
    ),
    Metric(
        "paceline_cpu_package_throttled_seconds_total",
        "counter",
        "seconds",
        "Time a package was throttled for heat.",
    ),
    Metric(
        "node_cpu_package_throttles_total",
        "counter",
        None,
        "Times a package was throttled for heat.",
    ),
)

_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_INTEL = {"performance": "cpu_core", "efficiency": "cpu_atom"}  # perf's devices
_CLASSES_AT_MOST = 8
_FREQUENCIES_AT_MOST = 64  # CPUs per class whose frequency is read
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_KILOHERTZ = 1000.0


class CpuCollector(Collector):
    name: ClassVar[str] = "cpu"
    interval_seconds: ClassVar[float] = 10.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._files = CachedFiles(patient=True, bytes_at_most=1 << 18)
        self._devices = context.sysfs_root / "devices"
        self._directory = os.path.join(self._devices, "system", "cpu")

    def collect(self, now_ns: int) -> Collected:
        cpus = {
            int(name[3:])
            for name in entries(self._directory)
            if name.startswith("cpu") and name[3:].isdecimal()
        }
        online = parse_cpu_list(self._files.read_text(f"{self._directory}/online", now_ns) or "")
        cpus = (cpus & online) or cpus
        if not cpus:
            raise CollectorUnavailable(f"no CPUs in {self._directory}")
        classes = self._classes(cpus, now_ns)
        samples: list[Sample] = []
        for name, members in classes.items():
            samples.append(_of_class("paceline_cpus", name, float(len(members)), now_ns))
            samples += self._frequency(name, sorted(members), now_ns)
        if len(classes) > 1:
            samples += self._time(classes, now_ns)
        samples += self._throttling(cpus, now_ns)
        return Collected(samples=samples)

    def close(self) -> None:
        self._files.close()

    def _classes(self, cpus: set[int], now_ns: int) -> dict[str, set[int]]:
        intel: dict[str, set[int]] = {}
        for name, device in _INTEL.items():
            text = self._files.read_text(self._devices / device / "cpus", now_ns) or ""
            if members := parse_cpu_list(text) & cpus:
                intel[name] = set(members)
        if intel:
            return intel
        capacities: dict[str, set[int]] = {}
        for cpu in cpus:
            capacity = self._number(cpu, "cpu_capacity", now_ns)
            name = "unknown" if capacity is None else f"capacity_{capacity}"
            capacities.setdefault(name, set()).add(cpu)
        return capacities if 1 < len(capacities) <= _CLASSES_AT_MOST else {"all": cpus}

    def _frequency(self, name: str, cpus: list[int], now_ns: int) -> Iterator[Sample]:
        asked = cpus[:: -(-len(cpus) // _FREQUENCIES_AT_MOST)]
        now = [self._number(cpu, "cpufreq/scaling_cur_freq", now_ns) for cpu in asked]
        known = [kilohertz * _KILOHERTZ for kilohertz in now if kilohertz]
        if known:
            for statistic, value in (
                ("min", min(known)),
                ("mean", fmean(known)),
                ("max", max(known)),
            ):
                labels = {"class": name, "statistic": statistic}
                yield Sample("paceline_cpu_frequency_hertz", labels, value, now_ns)
        could = self._number(asked[0], "cpufreq/cpuinfo_max_freq", now_ns)
        if could:
            yield _of_class("paceline_cpu_frequency_max_hertz", name, could * _KILOHERTZ, now_ns)

    def _time(self, classes: dict[str, set[int]], now_ns: int) -> Iterator[Sample]:
        text = self._files.read_text(self.context.procfs_root / "stat", now_ns) or ""
        class_of = {f"cpu{cpu}": name for name, cpus in classes.items() for cpu in cpus}
        sums: dict[str, list[int]] = {}
        for line in text.splitlines():
            cpu, _, rest = line.partition(" ")
            name = class_of.get(cpu)
            words = rest.split()[: len(_MODES)]
            if name is not None and all(word.isdecimal() and len(word) < 20 for word in words):
                so_far = sums.get(name, [0] * len(words))
                sums[name] = [one + int(word) for one, word in zip(so_far, words, strict=False)]
        for name, ticks in sums.items():
            for mode, count in zip(_MODES, ticks, strict=False):
                labels = {"class": name, "mode": mode}
                seconds = count / _TICKS_PER_SECOND
                yield Sample("paceline_cpu_class_seconds_total", labels, seconds, now_ns)

    def _throttling(self, cpus: set[int], now_ns: int) -> Iterator[Sample]:
        """Yield throttle counts of Intel CPUs, one per core and per package."""
        cores: dict[tuple[int, int], int] = {}
        packages: dict[int, tuple[int | None, int | None]] = {}
        for cpu in sorted(cpus):
            count = self._number(cpu, "thermal_throttle/core_throttle_count", now_ns)
            package = self._number(cpu, "topology/physical_package_id", now_ns)
            core = self._number(cpu, "topology/core_id", now_ns)
            if count is None or package is None or core is None:
                continue
            cores[package, core] = count
            if package not in packages:
                packages[package] = (
                    self._number(cpu, "thermal_throttle/package_throttle_count", now_ns),
                    self._number(cpu, "thermal_throttle/package_throttle_total_time_ms", now_ns),
                )
        for package, (count, milliseconds) in packages.items():
            labels = {"package": str(package)}
            of_cores = sum(each for (where, _), each in cores.items() if where == package)
            yield Sample("paceline_cpu_core_throttles_total", labels, float(of_cores), now_ns)
            if count is not None:
                yield Sample("node_cpu_package_throttles_total", labels, float(count), now_ns)
            if milliseconds is not None:
                metric = "paceline_cpu_package_throttled_seconds_total"
                yield Sample(metric, labels, milliseconds / 1000, now_ns)

    def _number(self, cpu: int, file: str, now_ns: int) -> int | None:
        return self._files.read_number(f"{self._directory}/cpu{cpu}/{file}", now_ns)


def _of_class(metric: str, name: str, value: float, now_ns: int) -> Sample:
    return Sample(metric, {"class": name}, value, now_ns)
