"""The node's key: a random secret that the agent makes at its first start and keeps on disk.

The server accepts batches under this agent's id, and sends its commands, to the holder of the first
key that it saw for the id. A stolen agent token alone is then not enough to act as this node.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from pathlib import Path

log = logging.getLogger(__name__)

FILE_NAME = "node-key"
_KEY = re.compile(r"[\w-]{43}", re.ASCII)


def load_node_key(directory: Path) -> str | None:
    """Return the key in `directory`, and create a missing one; None if that fails.

    Without a key the agent still works, as long as its server has never seen one for its id.
    """
    path = directory / FILE_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _read(path) or _create(path)
    except OSError as error:
        log.error(
            "the node's key %s cannot be used: %s. A server that has seen the key refuses this "
            "agent: restore the file, or remove it and run `paceline server node-key release` "
            "on the server",
            path,
            error.strerror,
        )
        return None


def _create(path: Path) -> str | None:
    """Create a key and write it durably.

    If another agent does so at the same time, one key wins.
    """
    key = secrets.token_urlsafe(32)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return _read(path)
    finally:
        temporary.unlink()
    return key


def _read(path: Path) -> str | None:
    """Return the key; None if there is no file. Raises OSError if the file cannot be trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is not a file of the agent's user")
        if status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "other users can read it")
        key = file.read(1000).strip()
    if not _KEY.fullmatch(key):
        raise OSError(errno.EINVAL, "it holds no key")
    return key
