"""The kernel log: XIDs with their meaning, machine checks, PCIe, links, disks, killed processes.

It is read from its device, or by syslog(2) if that may not be opened. Messages from before the
start of the agent are counted but not reported as events. Times in the log are from a clock that
stops during suspend and is never set, so that a jump of the wall clock has no effect. That clock
(sched_clock) is close to CLOCK_MONOTONIC or CLOCK_MONOTONIC_RAW, but drifts from both by seconds
per month: a message is new if it was written since the last sweep, whatever its time.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import entries
from paceline_agent.collect.contract import (
    Collected,
    Collector,
    CollectorUnavailable,
    Context,
    Metric,
)
from paceline_agent.collect.kernel_log.buffer import KernelLogBuffer
from paceline_agent.collect.kernel_log.ledger import KernelEventCounts
from paceline_agent.collect.kernel_log.recognize import Recognizer, pci_address
from paceline_agent.collect.kernel_log.records import Record, records_of
from paceline_agent.collect.kernel_log.relevance import RelevantLines
from paceline_agent.collect.kernel_log.rules import RULES
from paceline_agent.collect.kernel_log.source import KernelLogFile, LogLine
from paceline_agent.collect.rank_processes import ProcessOwners
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(
        metric_names.KERNEL_EVENTS_TOTAL,
        "counter",
        None,
        "Events in the kernel log, by kind, code and device.",
    ),
    Metric(
        metric_names.KERNEL_XID_INFO,
        "info",
        None,
        "What an XID that was seen means, and what NVIDIA says to do.",
    ),
    Metric(
        metric_names.RANK_KERNEL_EVENTS_TOTAL,
        "counter",
        None,
        "Events in the kernel log that concern a rank.",
    ),
    Metric(
        metric_names.KERNEL_PROCESS_XIDS_TOTAL,
        "counter",
        None,
        "XIDs that name a process, by the rank that owns it (JOB/RANK); no owner: another process.",
    ),
    Metric(
        metric_names.KERNEL_LOG_LOST_TOTAL,
        "counter",
        None,
        "Lines the kernel overwrote before they could be read.",
    ),
)

_LINES_PER_SWEEP = 2000
# First bytes of gzip, xz, zstd, bzip2 and UTF-16, read as UTF-8.
_PACKED = re.compile("\x1f\ufffd|\ufffd7zXZ|\\(\ufffd/\ufffd|BZh\\d|\ufffd\ufffd.?\x00")
# classes of PCI devices that are named by their class name
_CLASSES = ("infiniband", "net", "nvme")


class KmsgCollector(Collector):
    name: ClassVar[str] = "kmsg"
    interval_seconds: ClassVar[float] = 1.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._log: KernelLogFile | KernelLogBuffer = KernelLogFile(
            context.kmsg_path, RelevantLines(RULES).matches
        )
        self._recognizer = Recognizer()
        self._ledger = KernelEventCounts(self._name_of)
        # The later of the two possible clocks of the log: missing an event is better than repeating
        # an old one.
        self._began_us = max(self.boot_ns(), self.boot_ns(time.CLOCK_MONOTONIC_RAW)) // 1000
        self._has_begun = False
        self._drained_ns: int | None = None  # boot_ns when the whole log had been read
        self._names: dict[str, str] = {}
        self._owners = ProcessOwners(context.procfs_root)
        self._log_seconds = 0.0
        self._sequence: int | None = None
        self._lost = 0

    def collect(self, now_ns: int) -> Collected:
        self._owners.remember(self.context.local_ranks())
        was_caught_up = self._log.caught_up
        lines = self._read()
        ends = self.context.replays_kmsg and self._log.drained
        if ends:
            lines += self._log.last_line()
        if self.context.replays_kmsg and lines and not self._has_begun:
            self._has_begun = True
            if _PACKED.match(lines[0].text):
                raise CollectorUnavailable(f"{self.context.kmsg_path} is no text: unpack it first")
        boot_ns = self.boot_ns()
        for line in lines:
            self._recognizer.skip(line.skipped)
            records = list(records_of(line.text))
            if records and self._is_fresh(records[0].sequence):
                for record in records:
                    self._take(record, now_ns, boot_ns, news=was_caught_up)
        self._owners.remember_children(boot_ns / 1e9)
        if self._log.drained:
            self._drained_ns = boot_ns
        gpus = self.context.inventory.gpus
        samples = list(self._ledger.samples(now_ns, gpus, self.context.hostname))
        samples.append(Sample(metric_names.KERNEL_LOG_LOST_TOTAL, {}, float(self._lost), now_ns))
        return Collected(
            samples=samples,
            events=[*self._ledger.events(math.inf if ends else boot_ns / 1e9)],
            more=not self._log.drained,
        )

    def close(self) -> None:
        self._log.close()

    def boot_ns(self, clock: int = time.CLOCK_MONOTONIC) -> int:
        return time.clock_gettime_ns(clock)

    def _read(self) -> list[LogLine]:
        path = self.context.kmsg_path
        try:
            return self._log.read_lines(_LINES_PER_SWEEP)
        except PermissionError as error:
            if isinstance(self._log, KernelLogFile) and _is_device(path):
                self._log = KernelLogBuffer()
                return self._read()
            raise CollectorUnavailable(
                f"{path} may not be read: run as root, grant CAP_SYSLOG, "
                "or set kernel.dmesg_restrict=0"
            ) from error
        except FileNotFoundError as error:
            raise CollectorUnavailable(
                f"no {path}: in a container, mount the host's and grant CAP_SYSLOG"
            ) from error

    def _take(self, record: Record, now_ns: int, boot_ns: int, *, news: bool) -> None:
        event = self._recognizer.recognize(record.message, record.times)
        if event is None:
            return
        replays = self.context.replays_kmsg
        if replays:
            time_ns, self._log_seconds = (
                record.wall_ns or now_ns,
                record.seconds or self._log_seconds,
            )
        else:
            time_ns, self._log_seconds = now_ns - self._age_ns(record, boot_ns), boot_ns / 1e9
        if self._log.is_stream and record.boot_us is not None:
            news = news or record.boot_us >= self._began_us
        rank, is_foreign = None, False
        if event.pid is not None and event.kind == "xid":  # a worker of the rank may use its GPU
            rank = self._owners.rank_of(event.pid)
            is_foreign = rank is None and self._shows_pids_of_the_log()
        elif event.pid is not None:
            rank = self._owners.rank(event.pid)
        self._ledger.take(
            event,
            time_ns,
            self._log_seconds,
            rank=rank,
            is_foreign=is_foreign,
            alert=news or replays,
        )

    def _shows_pids_of_the_log(self) -> bool:
        """Return whether a pid of the log is the same process in /proc of this machine."""
        is_own_log = self._log.is_stream and not self.context.replays_kmsg
        return is_own_log and self._owners.has_pids_of_the_kernel()

    def _age_ns(self, record: Record, boot_ns: int) -> int:
        if not self._log.is_stream or record.boot_us is None:
            return 0  # the clock of a file may not be this machine's
        age_ns = max(0, boot_ns - record.boot_us * 1000)
        return age_ns if self._drained_ns is None else min(age_ns, boot_ns - self._drained_ns)

    def _is_fresh(self, sequence: int | None) -> bool:
        """Return False for a message that is repeated after the log was opened again."""
        if sequence is None or not self._log.is_stream:
            return True
        if self._sequence is not None:
            if sequence <= self._sequence:
                return False
            self._lost += sequence - self._sequence - 1
        self._sequence = sequence
        return True

    def _name_of(self, device: str) -> str:
        """Return gpu3, mlx5_0, eth0 or nvme0 for a PCI address; other names unchanged."""
        if ":" not in device:
            return device
        for gpu in self.context.inventory.gpus:
            if pci_address(gpu.pci_bus_id) == device:
                return f"gpu{gpu.index}"
        if device not in self._names:
            directory = self.context.sysfs_root / "bus" / "pci" / "devices" / device
            self._names[device] = _class_name(directory) or device
        return self._names[device]


def _is_device(path: Path) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def _class_name(device: Path) -> str | None:
    for name in _CLASSES:
        found = entries(device / name)
        if found:
            return found[0]
    return None
