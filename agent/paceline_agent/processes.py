"""What /proc says of one process. The root is given: tests freeze it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline_agent.kept_files import read_once, read_text_once

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    state: str  # R S D T Z ...
    cpu_seconds: float


def process_status(procfs_root: Path, pid: int) -> ProcessStatus | None:
    """None if it is gone."""
    try:
        content = read_once(procfs_root / str(pid) / "stat")
        fields = content[content.rindex(b")") + 2 :].split()
        ticks = int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessStatus(fields[0].decode(), ticks / _TICKS_PER_SECOND)


def namespace_pids(procfs_root: Path, pid: int) -> list[int]:
    """What a process is numbered here, and then in each PID namespace within; one if unknown."""
    try:
        status = read_text_once(procfs_root / str(pid) / "status")
    except OSError:
        return [pid]
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:] if word.isdecimal()] or [pid]
    return [pid]


def started_ns(procfs_root: Path, pid: int) -> int | None:
    """When it was started, by CLOCK_REALTIME as it is set now; None if it is gone."""
    try:
        content = read_once(procfs_root / str(pid) / "stat")
        ticks = int(content[content.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    up_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // _TICKS_PER_SECOND
    return time.time_ns() - up_ns
