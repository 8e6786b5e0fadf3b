"""The slot: one file that is reused for batch after batch while the server keeps up.

A new file per batch costs thirty times as much: create, rename, open, read, remove. The slot holds
a batch if it begins with that batch's frame, which is written last and wiped first. An agent that
is killed in between leaves either the complete batch or none.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_WIPED = bytes(12)  # written in place of a frame
ROOM_BYTES = 64 << 10


class Slot:
    """A reusable file for one batch. Its methods raise OSError if the disk fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def put(self, frame: bytes, payload: bytes) -> None:
        """Write a batch into the empty slot."""
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            os.close(self._descriptor)  # the file was removed
            self._descriptor = None
        descriptor = self._opened()
        if os.pwrite(descriptor, payload, len(frame)) < len(payload):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(descriptor, frame, 0)

    def read(self) -> bytes:
        """Return frame and payload, then old bytes of longer batches; empty if there is none."""
        content = os.pread(self._opened(), len(_WIPED) + ROOM_BYTES, 0)
        return b"" if content.startswith(_WIPED) else content

    def clear(self) -> None:
        """Empty the slot."""
        os.pwrite(self._opened(), _WIPED, 0)

    def _opened(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor
