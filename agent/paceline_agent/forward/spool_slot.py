"""The file that one batch after another passes through while the server keeps up.

A file of its own costs each batch thirty times as much: to be made, renamed, opened, read, removed.
The slot holds a batch while it begins with that batch's frame, which is written last and wiped
first: an agent that is killed in between leaves the batch whole, or none.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_WIPED = bytes(12)  # in place of a frame
ROOM_BYTES = 64 << 10


class Slot:
    """Methods raise OSError where the disk does not do it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def put(self, frame: bytes, payload: bytes) -> None:
        """Into an empty slot."""
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            os.close(self._descriptor)  # somebody removed the file
            self._descriptor = None
        descriptor = self._opened()
        if os.pwrite(descriptor, payload, len(frame)) < len(payload):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(descriptor, frame, 0)

    def read(self) -> bytes:
        """Frame, payload, and what longer ones left behind it; empty if there is none."""
        content = os.pread(self._opened(), len(_WIPED) + ROOM_BYTES, 0)
        return b"" if content.startswith(_WIPED) else content

    def clear(self) -> None:
        os.pwrite(self._opened(), _WIPED, 0)

    def _opened(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor
