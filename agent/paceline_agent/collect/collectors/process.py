"""Each rank's process: CPU, memory, faults, context switches, I/O, open files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import read_once, read_text_once
from paceline_agent.collect.child_processes import ChildProcesses
from paceline_agent.collect.contract import Collected, Collector, Context, Metric
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        "paceline_rank_process_resident_memory_max_bytes",
        "gauge",
        "bytes",
        "Greatest resident memory the rank's process had.",
    ),
    Metric(
        "paceline_rank_process_swapped_bytes",
        "gauge",
        "bytes",
        "Memory of the rank's process that is swapped out.",
    ),
    Metric("paceline_rank_process_minor_faults_total", "counter", None, "Page faults without I/O."),
    Metric("paceline_rank_process_threads", "gauge", None, "Threads of the rank's process."),
    Metric(
        "paceline_rank_process_io_wait_seconds_total",
        "counter",
        "seconds",
        "Time the main thread waited for block I/O.",
    ),
    Metric(
        "paceline_rank_process_read_bytes_total",
        "counter",
        "bytes",
        "Fetched from storage for the rank's process.",
    ),
    Metric(
        metric_names.RANK_PROCESS_WRITTEN_BYTES_TOTAL,
        "counter",
        "bytes",
        "Sent to storage by the rank's process.",
    ),
    Metric(
        metric_names.RANK_READ_BYTES_TOTAL,
        "counter",
        "bytes",
        "Fetched from storage for the rank's process and its children, such as loader workers.",
    ),
    Metric("paceline_rank_process_open_fds", "gauge", None, "Open files of the rank's process."),
    Metric(
        metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL,
        "counter",
        "seconds",
        "CPU time of the rank's process.",
    ),
    Metric(
        metric_names.RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL,
        "counter",
        "seconds",
        "Time the main thread could run and had no CPU.",
    ),
    Metric(
        "paceline_rank_process_resident_memory_bytes",
        "gauge",
        "bytes",
        "Resident memory of the rank's process.",
    ),
    Metric(
        metric_names.RANK_PROCESS_MAJOR_FAULTS_TOTAL,
        "counter",
        None,
        "Page faults that needed I/O.",
    ),
    Metric(
        metric_names.RANK_PROCESS_CONTEXT_SWITCHES_TOTAL,
        "counter",
        None,
        "Context switches of the main thread, by kind.",
    ),
)

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PREFIX = "paceline_rank_process_"
_READ = "read_bytes_total"
_IO = {"read_bytes": _READ, "write_bytes": "written_bytes_total"}

Values = Iterator[tuple[str, dict[str, str], float]]


class ProcessCollector(Collector):
    name: ClassVar[str] = "process"
    interval_seconds: ClassVar[float] = 2.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._accounts_delays: bool | None = None  # read once
        self._children = ChildProcesses(context.procfs_root)
        self._reads: dict[tuple[str, int, int], _Reads] = {}  # by job, rank and pid

    def collect(self, now_ns: int) -> Collected:
        if self._accounts_delays is None:
            self._accounts_delays = accounts_delays(self.context.procfs_root)
        samples: list[Sample] = []
        ranks = list(self.context.local_ranks())
        if ranks:
            self._children.refresh()
        keys = [(rank.job, rank.rank, rank.pid) for rank in ranks]
        self._reads = {key: self._reads.get(key) or _Reads() for key in keys}
        for rank, key in zip(ranks, keys, strict=True):
            labels = {"job": rank.job, "rank": str(rank.rank)}
            directory = self.context.procfs_root / str(rank.pid)
            try:
                read: float | None = None
                for name, more, value in _process(directory, accounts_delays=self._accounts_delays):
                    if name == _READ:
                        read = value
                    if not math.isfinite(value):
                        continue
                    samples.append(Sample(_PREFIX + name, {**labels, **more}, value, now_ns))
                children = self._children.of(rank.pid)
                self._reads[key].update(rank.pid, read, self.context.procfs_root, children)
            except (
                OSError,
                ValueError,
                IndexError,
                OverflowError,
            ):  # the process ended during the read
                continue
            if (total := self._reads[key].total_bytes) is not None:
                samples.append(Sample(metric_names.RANK_READ_BYTES_TOTAL, labels, total, now_ns))
        return Collected(samples=samples)


class _Reads:
    """Bytes that a process and its children have read from storage, also those that have ended."""

    def __init__(self) -> None:
        self.total_bytes: float | None = 0.0  # None: a process does not let itself be read
        self._last: dict[int, float] = {}  # by pid

    def update(
        self, pid: int, own: float | None, procfs_root: Path, children: Iterable[int]
    ) -> None:
        """Add what was read since the last call; `own`: the count of the process itself."""
        counts = {pid: own}
        for child in children:
            directory = procfs_root / str(child)
            found = {name: value for name, _, value in _storage(directory)}
            if _READ in found or directory.exists():
                counts[child] = found.get(_READ)
        read = {one: count for one, count in counts.items() if count is not None}
        if len(read) < len(counts):
            self.total_bytes = None
        if self.total_bytes is not None:
            news = (max(now - self._last.get(one, 0.0), 0.0) for one, now in read.items())
            self.total_bytes += sum(news)
        self._last = read


def accounts_delays(procfs_root: Path) -> bool:
    """Return whether the kernel measures I/O waits of tasks; off by default since Linux 5.14."""
    try:
        return read_once(procfs_root / "sys/kernel/task_delayacct").strip() != b"0"
    except OSError:  # an older kernel, which always measures them
        return True


def _process(directory: Path, *, accounts_delays: bool) -> Values:
    yield from _stat(read_text_once(directory / "stat"), accounts_delays)
    for line in read_text_once(directory / "status").splitlines():
        name, _, value = line.partition(":")
        if name.endswith("voluntary_ctxt_switches"):
            kind = {"kind": "involuntary" if name.startswith("non") else "voluntary"}
            yield "context_switches_total", kind, float(value)
        elif name == "VmHWM":
            yield "resident_memory_max_bytes", {}, int(value.split()[0]) * 1024.0
        elif name == "VmSwap":
            yield "swapped_bytes", {}, int(value.split()[0]) * 1024.0
    yield from _run_queue(directory)
    yield from _storage(directory)
    yield from _open_files(directory)


def _stat(text: str, accounts_delays: bool) -> Values:
    """Return values of `stat` (proc(5)); the command's name may contain spaces."""
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    yield "cpu_seconds_total", {}, ticks / _TICKS_PER_SECOND
    yield "resident_memory_bytes", {}, float(int(fields[21]) * _PAGE_BYTES)
    yield "minor_faults_total", {}, float(fields[7])
    yield "major_faults_total", {}, float(fields[9])
    yield "threads", {}, float(fields[17])
    if accounts_delays and len(fields) > 39:
        yield "io_wait_seconds_total", {}, int(fields[39]) / _TICKS_PER_SECOND


def _run_queue(directory: Path) -> Values:
    """Return how long the main thread was ready to run without a CPU."""
    try:
        _, waited_ns, _ = read_once(directory / "schedstat").split()
    except (FileNotFoundError, ValueError):  # a kernel without CONFIG_SCHED_INFO
        return
    yield "run_queue_wait_seconds_total", {}, int(waited_ns) / 1e9


def _storage(directory: Path) -> Values:
    """Return bytes read from and written to storage; unavailable for other users' processes."""
    try:
        lines = read_text_once(directory / "io").splitlines()
    except (PermissionError, FileNotFoundError):
        return
    for line in lines:
        name, _, value = line.partition(": ")
        if name in _IO:
            yield _IO[name], {}, float(value)


def _open_files(directory: Path) -> Values:
    try:
        # Since Linux 6.2 the size of the directory is the number of open files.
        count = os.stat(directory / "fd").st_size or len(os.listdir(directory / "fd"))
    except (PermissionError, FileNotFoundError):
        return
    yield "open_fds", {}, float(count)
