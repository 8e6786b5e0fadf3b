"""CPU time and memory of running processes, from /proc."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunningProcess:
    pid: int

    @property
    def rss_mib(self) -> float:
        return _status_kib(self.pid, "VmRSS") / 1024

    @property
    def pss_mib(self) -> float:
        """Return resident memory, each page divided by the number of processes that share it."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
        raise ValueError(f"process {self.pid} has no proportional size")

    @property
    def cpu_ms(self) -> float:
        """Return CPU time of all threads in ns resolution; /proc/PID/stat counts ticks of 10 ms."""
        spent_ns = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                spent_ns += int((task / "schedstat").read_text().split()[0])
        return spent_ns / 1e6

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        try:
            return bool(self.command)
        except OSError:
            return False

    @property
    def command(self) -> str:
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()

    def family(self) -> Family:
        """Return the process and its running descendants."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
        found, open_pids = [], [self.pid]
        while open_pids:
            found.append(open_pids.pop())
            open_pids += children.get(found[-1], [])
        running = (RunningProcess(pid) for pid in found)
        return Family(tuple(each for each in running if each.command))  # a zombie has no command


@dataclass(frozen=True, slots=True)
class Family:
    """A process and its descendants; the process itself is first."""

    members: tuple[RunningProcess, ...]

    @property
    def cpu_ms(self) -> float:
        return sum(member.cpu_ms for member in self.members)

    @property
    def pss_mib(self) -> float:
        return sum(member.pss_mib for member in self.members)

    def having(self, text: str) -> tuple[RunningProcess, ...]:
        """Return the descendants with `text` in their command line."""
        return tuple(member for member in self.members[1:] if text in member.command)


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1  # the process has ended
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _status_kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise ValueError(f"process {pid} has no {name}")
