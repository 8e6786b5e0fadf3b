"""The directory with the rings of a node, and how a process on that node finds it.

The owner of the directory can send commands to a rank (through its control page). A directory that
is found by default is therefore used only if it belongs to root, to the process's own user, or to
the account of the agent's service.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "paceline-"
LOCK = "agent.lock"  # locked (flock) while the agent runs
RINGS = "rings"
ACCOUNT = "paceline"  # the same as in deploy/systemd

_LOCKS = Path("/proc/locks")


def rings_of_running_agents() -> list[Path]:
    """Return the ring directories of this node's running agents with a default directory."""
    held_locks = _held_locks()
    return sorted(
        lock.parent / RINGS
        for lock in MEMORY.glob(f"{PREFIX}*/{LOCK}")
        if _lock_id(lock) in held_locks
        and _is_trusted(lock.parent)
        and _is_trusted(lock.parent / RINGS)
    )


def is_in_use(directory: Path) -> bool:
    """Return whether an agent with this directory runs."""
    return _lock_id(directory / LOCK) in _held_locks()


def own_agent(directory: Path) -> int | None:
    """Return the pid of the agent with this directory, if it runs as this user and is visible."""
    lock = directory / LOCK
    try:
        is_own = lock.stat().st_uid == os.getuid()
    except OSError:
        return None
    holder = _held_locks().get(_lock_id(lock) or "", "")
    return int(holder) if is_own and holder.isdecimal() and int(holder) else None


def _held_locks() -> dict[str, str]:
    """Return the pid of the holder by `MAJOR:MINOR:INODE` of each locked file that this process can
    see; 0 if the holder is in another PID namespace."""
    try:
        lines = map(str.split, _LOCKS.read_text().splitlines())
    except OSError:
        return {}
    return {fields[5]: fields[4] for fields in lines if len(fields) > 5 and fields[1] == "FLOCK"}


def _lock_id(lock: Path) -> str | None:
    """Return a file's id in the format of /proc/locks."""
    try:
        status = lock.stat()
    except OSError:
        return None
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def _is_trusted(directory: Path) -> bool:
    try:
        owner = directory.lstat().st_uid
        return owner in (0, os.getuid()) or pwd.getpwuid(owner).pw_name == ACCOUNT
    except (OSError, KeyError):
        return False
