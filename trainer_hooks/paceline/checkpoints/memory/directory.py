"""The directory of copies on a node.

    ROOT/                                         of one user, mode 0700, in shared memory
        RUN/                                      of one checkpoint directory
            g00000003.s000000000040.r000002.copy  generation, step and rank; complete and hashed
            g00000003.r000002.PID.0.part          being written, or free

A file is renamed to its `.copy` name once it is complete, and back before it is written again.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoints.errors import CheckpointError

# Runs that copied nothing for so long have ended: their files are deleted by the next run.
ABANDONED_SECONDS = 24 * 3600.0
_NAME = re.compile(r"g(\d{8,})\.s(\d{12,})\.r(\d{6,})\.copy")
_RUN = re.compile(r"[0-9a-f]{32}")  # as `layout.run_of` makes it


class CopyName(NamedTuple):
    """A copy; the greatest one of a rank is the newest."""

    generation: int
    step: int
    rank: int

    @property
    def file(self) -> str:
        return f"g{self.generation:08}.s{self.step:012}.r{self.rank:06}.copy"


class CopyDirectory:
    """The files of one run on this node."""

    def __init__(self, root: Path, run: str) -> None:
        """Create the directory, and delete files of runs that ended long ago.

        Raises:
            CheckpointError: it belongs to another user, or all users may write to it.
            OSError: it cannot be created.
        """
        _make_private(root)
        self.run = run
        self.path = root / run
        _make_private(self.path)
        _delete_abandoned(root, self.path)

    def copies(self) -> list[CopyName]:
        """Return the copies, whatever process wrote them."""
        matches = (_NAME.fullmatch(path.name) for path in self._find("*.copy"))
        return sorted(CopyName(*map(int, match.groups())) for match in matches if match)

    def file(self, name: CopyName) -> Path:
        return self.path / name.file

    def used_bytes(self) -> int:
        """Return the size of all files."""
        return sum(path.stat().st_size for path in self.path.iterdir())

    def delete(self, where: Callable[[CopyName], bool]) -> None:
        """Delete copies."""
        for name in self.copies():
            if where(name):
                self.file(name).unlink(missing_ok=True)

    def delete_leftovers(self) -> None:
        """Delete parts whose process is gone."""
        for path in self._find("*.part"):
            pid = path.name.split(".")[2]
            if not Path("/proc", pid).exists():
                path.unlink(missing_ok=True)

    def delete_parts(self, generation: int, pid: int) -> None:
        """Delete the parts that a process wrote in a generation."""
        for path in self._find(f"g{generation:08}.r*.{pid}.*.part"):
            path.unlink(missing_ok=True)

    def remove(self, generation: int, ranks: Container[int]) -> None:
        """Delete what a process has in this generation, all of older ones, and the directory last.

        Other ranks of the node may still write their last copy.

        Args:
            generation: of the training that has ended.
            ranks: those whose copies this process has made or held.
        """
        self.delete(
            lambda name: (
                name.generation < generation
                or (name.generation == generation and name.rank in ranks)
            )
        )
        for path in self._find("*.part"):
            if int(path.name.split(".")[0][1:]) < generation:
                path.unlink(missing_ok=True)
        self.delete_parts(generation, os.getpid())
        try:
            self.path.rmdir()
        except OSError:  # a newer generation or another rank uses it, or that was faster
            return

    def _find(self, pattern: str) -> list[Path]:
        """Return the files with such names; none if another rank removes the directory now."""
        try:
            return list(self.path.glob(pattern))
        except FileNotFoundError:
            return []


def available_bytes(root: Path) -> int:
    """Return the memory that can be used for files in `root`: the least that limits it."""
    space = os.statvfs(root)
    free = [space.f_bavail * space.f_frsize, *_cgroup_headrooms()]
    found = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    if found:
        free.append(int(found[1]) * 1024)
    return max(0, min(free))


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CheckpointError(f"{path} is not a directory of this user")
    if found.st_mode & stat.S_IWOTH:  # such as /dev/shm itself, of root
        raise CheckpointError(f"{path} is open to all users: name a directory of your own in it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def _delete_abandoned(root: Path, own: Path) -> None:
    """Delete the directories of runs that ended long ago, and nothing else that is in the root."""
    for path in filter(lambda each: _RUN.fullmatch(each.name), root.iterdir()):
        try:  # a rename in the directory is a change of it
            age = time.time() - path.lstat().st_mtime
        except OSError:  # deleted by another process
            continue
        if path != own and age > ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _cgroup_headrooms() -> list[int]:
    """Return what the memory limits of this process's control groups leave."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        base = Path("/sys/fs/cgroup", root)
        own = base / name.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(base):
                break
            headroom = _headroom(group, limit, usage, cache)
            if headroom is not None:
                found.append(headroom)
    return found


def _headroom(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit here, or not to be seen from inside a container
        return None
    return None if most == "max" else int(most) - used + int(statistics.get(cache, 0))
