"""Space of the file systems that a training fills: checkpoints, rings, shared memory, temporary.

A call on a network file system whose server is gone can block for hours; only this collector's
thread is affected. For NFS the duration of operations is included; for local disks it is in
`host.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline_agent.collect.cached_files import read_text_once
from paceline_agent.collect.contract import Collected, Collector, Context, LocalRank, Metric
from paceline_agent.collect.process_environment import read_environment
from paceline_wire import metric_names
from paceline_wire.batch import Sample

METRICS = (
    Metric(metric_names.FILESYSTEM_SIZE_BYTES, "gauge", "bytes", "Size of the file system."),
    Metric(metric_names.FILESYSTEM_AVAIL_BYTES, "gauge", "bytes", "Space left for users."),
    Metric("node_filesystem_files_free", "gauge", None, "Files that can still be made."),
    Metric("node_filesystem_*", "gauge", None, "Of the file system, as node_exporter names it."),
    Metric(
        "paceline_checkpoint_directory_info",
        "info",
        None,
        "The file system of a job's checkpoint directory.",
    ),
    Metric(
        "paceline_nfs_operations_total",
        "counter",
        None,
        "READ, WRITE and COMMIT requests of an NFS mount.",
    ),
    Metric("paceline_nfs_retransmissions_total", "counter", None, "NFS requests sent again."),
    Metric("paceline_nfs_timeouts_total", "counter", None, "NFS requests that timed out."),
    Metric("paceline_nfs_bytes_total", "counter", "bytes", "Sent and received for NFS requests."),
    Metric(
        "paceline_nfs_operation_seconds_total",
        "counter",
        "seconds",
        "Time NFS requests took, queue and answer included.",
    ),
)

_DIRECTORIES = ("/", "/tmp", "/dev/shm")
_JOBS_AT_MOST = 16
_VARIABLE = "PACELINE_CHECKPOINT_DIRECTORY"
_ESCAPE = re.compile(r"\\([0-7]{3})")  # proc_pid_mountinfo(5)

_MOUNTED = re.compile(r"device \S+ mounted on (\S+) with fstype ")
_OPERATION = re.compile(r"\s+(?P<name>READ|WRITE|COMMIT): (?P<numbers>(?:[0-9]{1,20} ?){8,})$")


@dataclass(frozen=True, slots=True)
class Mount:
    mountpoint: str
    device: str
    fstype: str
    number: str = ""  # device number of the block device such as "259:1"; empty without one

    @property
    def labels(self) -> dict[str, str]:
        return {"device": self.device, "fstype": self.fstype, "mountpoint": self.mountpoint}


class StorageCollector(Collector):
    name: ClassVar[str] = "storage"
    interval_seconds: ClassVar[float] = 10.0
    metrics: ClassVar[tuple[Metric, ...]] = METRICS

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._is_this_machine = context.procfs_root == Path("/proc")
        self._directories: dict[tuple[str, int, int], str | None] = {}  # by rank process

    def collect(self, now_ns: int) -> Collected:
        mounts = read_mounts(self.context.procfs_root)
        own = [str(self.context.node_directory), *(_DIRECTORIES if self._is_this_machine else ())]
        samples: list[Sample] = []
        found: dict[str, Mount] = {}
        for directory in own:
            mount = mount_of(directory, mounts)
            found.setdefault(mount.mountpoint, mount)
        for job, directory in sorted(self._checkpoint_directories().items()):
            mount = mount_of(directory, mounts)
            found.setdefault(mount.mountpoint, mount)
            disk = disk_of(mount, self.context.sysfs_root)
            labels = {"job": job, "directory": directory, "disk": disk, **mount.labels}
            samples.append(Sample("paceline_checkpoint_directory_info", labels, 1.0, now_ns))
        if self._is_this_machine:  # otherwise the tree is a copy of another node's
            for mount in found.values():
                samples += _space(mount, now_ns)
        if any(mount.fstype.startswith("nfs") for mount in found.values()):
            samples += _nfs(self.context.procfs_root, found, now_ns)
        return Collected(samples=samples)

    def _checkpoint_directories(self) -> dict[str, str]:
        """Return the checkpoint directory of each job, from the environment of its ranks."""
        ranks = self.context.local_ranks()
        asked = {(rank.job, rank.generation, rank.pid): rank for rank in ranks}
        self._directories = {
            key: self._directories[key] if key in self._directories else self._directory_of(rank)
            for key, rank in asked.items()
        }
        found = {job: path for (job, _, _), path in self._directories.items() if path is not None}
        return dict(list(found.items())[:_JOBS_AT_MOST])

    def _directory_of(self, rank: LocalRank) -> str | None:
        environment = read_environment(self.context.procfs_root, rank.pid, (_VARIABLE,)) or {}
        directory = environment.get(_VARIABLE, "")
        return directory if directory.startswith("/") else None


def _space(mount: Mount, now_ns: int) -> Iterator[Sample]:
    try:
        found = os.statvfs(mount.mountpoint)
    except OSError:
        return
    if not found.f_blocks:  # a pseudo file system
        return
    values = {
        metric_names.FILESYSTEM_SIZE_BYTES: found.f_blocks * found.f_frsize,
        "node_filesystem_free_bytes": found.f_bfree * found.f_frsize,
        metric_names.FILESYSTEM_AVAIL_BYTES: found.f_bavail * found.f_frsize,
        metric_names.FILESYSTEM_READONLY: int(bool(found.f_flag & os.ST_RDONLY)),
    }
    if found.f_files:  # zero for network file systems without such a limit
        values["node_filesystem_files"] = found.f_files
        values["node_filesystem_files_free"] = found.f_favail
    for name, value in values.items():
        yield Sample(name, mount.labels, float(value), now_ns)


def _nfs(procfs_root: Path, wanted: Container[str], now_ns: int) -> Iterator[Sample]:
    """Yield samples of /proc/self/mountstats.

    The line of an operation holds requests, transmissions, timeouts, bytes sent, bytes received,
    and milliseconds in the queue, in transit and in total (net/sunrpc/stats.c).
    """
    try:
        lines = read_text_once(procfs_root / "self" / "mountstats").splitlines()
    except OSError:
        return
    mountpoint = None
    for line in lines:
        mounted = _MOUNTED.match(line)
        if mounted is not None:
            mountpoint = _unescaped(mounted[1]) if _unescaped(mounted[1]) in wanted else None
            continue
        operation = None if mountpoint is None else _OPERATION.match(line)
        if operation is None:
            continue
        labels = {"mountpoint": mountpoint or "", "operation": operation["name"]}
        requests, transmissions, timeouts, sent, received, _, _, milliseconds = map(
            float, operation["numbers"].split()[:8]
        )
        values = {
            "operations_total": requests,
            "retransmissions_total": max(transmissions - requests, 0.0),
            "timeouts_total": timeouts,
            "bytes_total": sent + received,
            "operation_seconds_total": milliseconds / 1000,
        }
        for name, value in values.items():
            yield Sample(f"paceline_nfs_{name}", labels, value, now_ns)


def mount_of(directory: str, mounts: dict[str, Mount]) -> Mount:
    """Return the file system of a path: the longest mount point above it."""
    for path in (directory, *map(str, Path(directory).parents)):
        if path in mounts:
            return mounts[path]
    return Mount(directory, "", "")


def disk_of(mount: Mount, sysfs_root: Path) -> str:
    """Return the disk as node_disk_* labels it (`nvme0n1` for its partitions); empty for networks.

    /sys/dev/block/259:1 is a link to .../nvme0n1/nvme0n1p1.
    """
    link = sysfs_root / "dev" / "block" / mount.number
    if not mount.number or not link.exists():
        return ""
    found = link.resolve()
    return found.parent.name if (found / "partition").exists() else found.name


def read_mounts(procfs_root: Path) -> dict[str, Mount]:
    """Return mounts by mount point; if several share one, the last, which hides the others."""
    try:
        lines = read_text_once(procfs_root / "self" / "mountinfo").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        fields, _, rest = line.partition(" - ")
        about, where = rest.split(), fields.split()
        if len(about) >= 2 and len(where) >= 5:
            mountpoint = _unescaped(where[4])
            found[mountpoint] = Mount(mountpoint, about[1], about[0], where[2])
    return found


def _unescaped(path: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)
