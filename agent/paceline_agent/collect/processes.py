"""Properties of one process from /proc; tests pass a frozen root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from paceline_agent.collect.cached_files import entries, inode_of, read_once, read_text_once

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_START_RESOLUTION_NS = 1_000_000_000  # a tick is 10 ms
_UNREAPED, _DEAD = b"Z", b"X"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    state: str  # R S D T ...
    cpu_seconds: float


class ProcessKey(NamedTuple):
    """A process; a later one with the same number has another start."""

    pid: int
    started_ticks: int  # since boot


def process_status(procfs_root: Path, pid: int) -> ProcessStatus | None:
    """Return the status; None if the process is gone, or if it has ended and its parent has not
    asked how."""
    try:
        fields = _fields(procfs_root, pid)
        ticks = int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None
    if fields[0] in (_UNREAPED, _DEAD):
        return None
    return ProcessStatus(fields[0].decode(), ticks / _TICKS_PER_SECOND)


def unreaped_status(procfs_root: Path, pid: int) -> int | None:
    """Return the wait status of a process that has ended and whose parent has not asked for it.

    None if it is no such process. The kernel also reports 0 if the agent may not see it.
    """
    try:
        fields = _fields(procfs_root, pid)
        return int(fields[49]) if fields[0] == _UNREAPED else None
    except (OSError, ValueError, IndexError):
        return None


def _fields(procfs_root: Path, pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third one on. Raises OSError, ValueError."""
    content = read_once(procfs_root / str(pid) / "stat")
    return content[content.rindex(b")") + 2 :].split()


def process_users(procfs_root: Path, pid: int) -> set[int]:
    """Return its uids on the node and in its own user namespace; empty if the process is gone.

    A container with a user namespace may create files on the node under either.
    """
    try:
        status = read_text_once(procfs_root / str(pid) / "status")
        ranges = read_text_once(procfs_root / str(pid) / "uid_map").splitlines()
    except OSError:
        return set()
    outside = {*_uids(status)}
    inside = {
        uid - first_outside + first_inside
        for first_inside, first_outside, count in (map(int, line.split()) for line in ranges)
        for uid in outside
        if first_outside <= uid < first_outside + count
    }
    return outside | inside


def real_user(procfs_root: Path, pid: int) -> int | None:
    """Return the uid of the user who runs the process; None if it is gone.

    The owner of its files in /proc is another one, root, if the process is not dumpable.
    """
    try:
        return next(_uids(read_text_once(procfs_root / str(pid) / "status")), None)
    except OSError:
        return None


def _uids(status: str) -> Iterator[int]:
    """Yield the real, effective, saved and file-system uid of a process on the node."""
    yield from map(int, status.partition("\nUid:")[2].partition("\n")[0].split())


def namespace_pids(procfs_root: Path, pid: int) -> list[int]:
    """Return its pid on the node, then in each nested PID namespace; one pid if unknown."""
    try:
        status = read_text_once(procfs_root / str(pid) / "status")
    except OSError:
        return [pid]
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:] if word.isdecimal()] or [pid]
    return [pid]


def process_that_maps(procfs_root: Path, mapped: os.stat_result, pid: int) -> int | None:
    """Return the node's pid of the process that maps the file, and has `pid` in its PID namespace.

    None if no process with that number is seen to map it.
    """
    device = f"{os.major(mapped.st_dev):02x}:{os.minor(mapped.st_dev):02x}"
    place = f" {device} {mapped.st_ino} ".encode()
    for candidate in chain([pid], _numbered(procfs_root, pid)):
        with contextlib.suppress(OSError):
            if place in read_once(procfs_root / str(candidate) / "maps"):
                return candidate
    return None


def _numbered(procfs_root: Path, pid: int) -> Iterator[int]:
    """Yield processes that have this pid in a PID namespace other than the agent's.

    A process whose namespace cannot be read is skipped: its maps cannot be read either.
    """
    ours = inode_of(procfs_root / "self/ns/pid")
    for name in filter(str.isdecimal, entries(procfs_root)):
        if inode_of(f"{procfs_root}/{name}/ns/pid") in (ours, None):
            continue
        if namespace_pids(procfs_root, int(name))[-1] == pid:
            yield int(name)


def session_of(procfs_root: Path, pid: int) -> int | None:
    """Return the process that leads the session of this one; None if it is not known."""
    try:
        return int(_fields(procfs_root, pid)[3])
    except (OSError, ValueError, IndexError):
        return None


def process_key(procfs_root: Path, pid: int) -> ProcessKey | None:
    """Return the current process with this pid; None without one."""
    try:
        return ProcessKey(pid, int(_fields(procfs_root, pid)[19]))
    except (OSError, ValueError, IndexError):
        return None


def parent_of(procfs_root: Path, pid: int) -> ProcessKey | None:
    """Return the parent; None if it is not known."""
    try:
        return process_key(procfs_root, int(_fields(procfs_root, pid)[1]))
    except (OSError, ValueError, IndexError):
        return None


def is_running(procfs_root: Path, process: ProcessKey) -> bool:
    """Return whether the process has not ended."""
    try:
        fields = _fields(procfs_root, process.pid)
        return fields[0] not in (_UNREAPED, _DEAD) and int(fields[19]) == process.started_ticks
    except (OSError, ValueError, IndexError):
        return False


def started_ns(procfs_root: Path, pid: int) -> int | None:
    """Return its start time by the current CLOCK_REALTIME; None if it is gone."""
    process = process_key(procfs_root, pid)
    return None if process is None else time.time_ns() - _age_ns(process)


def has_started_after(process: ProcessKey, monotonic_ns: int) -> bool:
    """Return whether a process is certainly younger than something of this CLOCK_MONOTONIC."""
    return _age_ns(process) < time.monotonic_ns() - monotonic_ns - _START_RESOLUTION_NS


def _age_ns(process: ProcessKey) -> int:
    """Return the time since its start, with the time for which the machine was suspended."""
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return now_ns - process.started_ticks * 1_000_000_000 // _TICKS_PER_SECOND
