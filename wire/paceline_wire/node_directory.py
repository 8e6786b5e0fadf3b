"""Where an agent keeps the rings of its node, and how a process of that node finds them.

Whoever owns the directory can tell a rank what to do (its control page): one that nobody named is
taken only from root, from the process's own user, and from the account the agent's service has.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

MEMORY = Path("/dev/shm")
PREFIX = "paceline-"
LOCK = "agent.lock"  # held (flock) while the agent lives
RINGS = "rings"
ACCOUNT = "paceline"  # deploy/systemd

_LOCKS = Path("/proc/locks")


def rings_of_running_agents() -> list[Path]:
    """Of the agents of this node whose directory is where it is by default."""
    held = _held_locks()
    return sorted(
        lock.parent / RINGS
        for lock in MEMORY.glob(f"{PREFIX}*/{LOCK}")
        if _place(lock) in held and _is_trusted(lock.parent) and _is_trusted(lock.parent / RINGS)
    )


def _held_locks() -> set[str]:
    """`MAJOR:MINOR:INODE` of each file that somebody has locked, as far as we may see."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return set()
    return {fields[5] for line in lines if len(fields := line.split()) > 5 and fields[1] == "FLOCK"}


def _place(lock: Path) -> str | None:
    try:
        found = lock.stat()
    except OSError:
        return None
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _is_trusted(directory: Path) -> bool:
    try:
        owner = directory.lstat().st_uid
        return owner in (0, os.getuid()) or pwd.getpwuid(owner).pw_name == ACCOUNT
    except (OSError, KeyError):
        return False
