"""The processes that compete with the ranks for the CPUs of the node, while tasks wait for CPUs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from paceline_agent.collect.cached_files import read_once, read_text_once
from paceline_agent.collect.child_processes import ChildProcesses
from paceline_agent.collect.contract import Collected, Collector, Context, Metric
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        metric_names.OTHER_PROCESSES_CPUS,
        "gauge",
        None,
        "CPUs that the processes of this name use which belong to no rank; of the busiest names.",
    ),
    Metric(
        metric_names.OTHER_PROCESSES_PID,
        "gauge",
        None,
        "PID of the busiest process of this name.",
    ),
)

# Share of the time in which tasks wait for a CPU (PSI, 10 s) from which processes are read. Reading
# a thousand of them takes some 15 ms, which a node without contention does not spend.
_LEAST_PRESSURE_PERCENT = 5.0
_LEAST_CPUS = 0.1
_SHOWN_NAMES = 3
_MOST_NAMES = 64  # different names since the start; each is a series of its own
_OTHERS = "others"
_KERNEL_THREADS = "kernel threads"
_KTHREADD = 2  # parent of all kernel threads
_LONGEST_NAME = 48
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class _ProcessUse(NamedTuple):
    parent: int
    command: str
    ticks: int  # CPU time
    started_ticks: int  # since boot; a later process of the same number has another


class OtherProcessesCollector(Collector):
    name: ClassVar[str] = "other_processes"
    interval_seconds: ClassVar[float] = 2.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._children = ChildProcesses(context.procfs_root)
        self._before: dict[int, _ProcessUse] = {}
        self._before_ns = 0
        self._names: set[str] = set()  # that were reported

    def collect(self, now_ns: int) -> Collected:
        ranks = [rank.pid for rank in self.context.local_ranks()]
        if not ranks or not _is_contended(self.context.procfs_root):
            self._before = {}
            return Collected()
        self._children.refresh()
        processes = _processes(self.context.procfs_root)
        before, before_ns = self._before, self._before_ns
        self._before, self._before_ns = processes, now_ns
        seconds = (now_ns - before_ns) / 1e9
        if not before or seconds <= 0.0:
            return Collected()
        of_ranks = set(ranks).union(*map(self._children.of, ranks))
        used = {
            pid: _ticks_since(before.get(pid), process) / _TICKS_PER_SECOND / seconds
            for pid, process in processes.items()
            if pid not in of_ranks
        }
        return Collected(samples=self._samples(processes, used, now_ns))

    def _samples(
        self, processes: Mapping[int, _ProcessUse], used: Mapping[int, float], now_ns: int
    ) -> list[Sample]:
        by_name: dict[str, list[int]] = defaultdict(list)
        for pid, cpus in used.items():
            if cpus > 0.0:
                by_name[self._name(pid, processes[pid])].append(pid)
        cpus_of = {name: sum(used[pid] for pid in pids) for name, pids in by_name.items()}
        busiest = sorted(cpus_of, key=lambda name: -cpus_of[name])[:_SHOWN_NAMES]
        samples = []
        for name in busiest:
            if cpus_of[name] < _LEAST_CPUS:
                continue
            self._names.add(name)
            labels = {"command": name}
            pid = max(by_name[name], key=lambda each: used[each])
            samples += [
                Sample(metric_names.OTHER_PROCESSES_CPUS, labels, cpus_of[name], now_ns),
                Sample(metric_names.OTHER_PROCESSES_PID, labels, float(pid), now_ns),
            ]
        return samples

    def _name(self, pid: int, process: _ProcessUse) -> str:
        """Return the name of the command; of Python that of the script or module it runs."""
        name = process.command
        if _KTHREADD in (pid, process.parent):
            name = _KERNEL_THREADS
        elif name.startswith("python"):
            name = _script(self.context.procfs_root / str(pid)) or name
        name = "".join(filter(str.isprintable, name))[:_LONGEST_NAME] or _OTHERS
        return name if name in self._names or len(self._names) < _MOST_NAMES else _OTHERS


def _is_contended(procfs_root: Path) -> bool:
    """Return whether tasks wait for CPUs; without PSI, whether more tasks run than there are
    CPUs."""
    try:
        some = read_text_once(procfs_root / "pressure/cpu").split()
        return float(some[1].removeprefix("avg10=")) >= _LEAST_PRESSURE_PERCENT
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(read_text_once(procfs_root / "loadavg").split()[0]) > (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return False


def _processes(procfs_root: Path) -> dict[int, _ProcessUse]:
    found = {}
    for name in os.listdir(procfs_root):
        if name.isdigit():
            try:
                text = read_text_once(procfs_root / name / "stat")
                command, _, rest = text.partition("(")[2].rpartition(")")
                fields = rest.split()
                ticks = int(fields[11]) + int(fields[12])
                found[int(name)] = _ProcessUse(int(fields[1]), command, ticks, int(fields[19]))
            except (OSError, ValueError, IndexError):  # it has ended
                continue
    return found


def _ticks_since(before: _ProcessUse | None, now: _ProcessUse) -> int:
    if before is None or before.started_ticks != now.started_ticks:
        return now.ticks  # it began since
    return max(now.ticks - before.ticks, 0)


def _script(directory: Path) -> str | None:
    """Return what a Python process runs: `train.py`, `-m package.module` or `-c`; None: unknown.

    No other arguments: they may contain secrets.
    """
    try:
        text = read_once(directory / "cmdline").decode(errors="replace")
    except OSError:
        return None
    arguments = iter([argument for argument in text.split("\0") if argument][1:])
    for argument in arguments:
        if argument == "-m":
            module = next(arguments, None)
            return module and f"python -m {module}"
        if argument == "-c":
            return "python -c"
        if argument in ("-W", "-X"):
            next(arguments, None)  # its value
        elif not argument.startswith("-"):
            return f"python {Path(argument).name}"
    return None
