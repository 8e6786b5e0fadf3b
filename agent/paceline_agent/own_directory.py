"""The directory of an agent on its node: no other user may have prepared it or may write to it.

Its default place, /dev/shm, is open to all users. The user who creates the directory first owns its
content, and could make `rings` a link to any directory of the system. So each level is opened
without following links, and its owner and mode are checked and set on the open descriptor.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from paceline_agent.errors import UnsafeDirectoryError
from paceline_wire.node_directory import RINGS

LOGS = "logs"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_MODE = 0o711  # ranks of other users reach `rings`, and list nothing
# new files get the agent's group; users can remove only their own files
_SHARED_RINGS_MODE = 0o3777


def prepare(directory: Path, *, shared: bool) -> int:
    """Create what is missing of the directory, its rings and its logs; return its descriptor.

    Args:
        directory: of the agent; its parent must exist.
        shared: whether ranks of other users create rings.

    Raises:
        UnsafeDirectoryError: it is a link or no directory, or another user owns it or may write it.
        OSError: it cannot be created or opened.
    """
    parent = os.stat(directory.parent)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise UnsafeDirectoryError(
            f"any user can replace {directory}, because {directory.parent} is open to all: choose "
            "another --node-directory"
        )
    descriptor = open_own(directory, _DIRECTORY_MODE)
    try:
        rings = open_own(directory / RINGS, 0o700, within=descriptor, shared=shared)
        logs = open_own(directory / LOGS, 0o700, within=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(rings)
    os.close(logs)
    return descriptor


def open_own(path: Path, mode: int, *, within: int | None = None, shared: bool = False) -> int:
    """Open a directory, created if missing, that belongs to root or to the agent's user.

    Args:
        path: of the directory.
        mode: to set if the agent's user owns it.
        within: descriptor of its parent, where only this agent creates files.
        shared: other users may create files in it. Without it, a directory stays open to them if
            an administrator opened it.
    """
    name = path if within is None else path.name
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=within)
    try:
        descriptor = os.open(name, _OPEN, dir_fd=within)
    except NotADirectoryError:
        raise UnsafeDirectoryError(
            f"{path} is a symbolic link or not a directory: remove it, or choose another "
            "--node-directory"
        ) from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (0, os.geteuid()):
            raise UnsafeDirectoryError(
                f"{path} belongs to {_user(status.st_uid)}, not to root or the agent's user: "
                "remove it, or choose another --node-directory"
            )
        is_open = path.name == RINGS and bool(status.st_mode & stat.S_IWOTH)
        if status.st_uid == os.geteuid():
            os.fchmod(descriptor, _SHARED_RINGS_MODE if shared or is_open else mode)
        elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise UnsafeDirectoryError(
                f"{path} belongs to root and other users may write to it: chmod go-w {path}"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_owner(path: Path, option: str) -> None:
    """Check that a directory, if it exists, belongs to root or to the agent's user.

    Raises UnsafeDirectoryError: its owner could replace the files in it.
    """
    try:
        owner = os.stat(path).st_uid
    except OSError:  # it does not exist, or its use fails with the reason
        return
    if owner not in (0, os.geteuid()):
        raise UnsafeDirectoryError(
            f"{path} belongs to {_user(owner)}, not to root or the agent's user: change its owner, "
            f"or choose another {option}"
        )


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
