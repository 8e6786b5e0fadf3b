"""Follow files that other programs write, truncate and replace, with limited work per call."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from paceline_agent.collect.cached_files import open_regular

LOOK_BYTES = 1 << 20
FIRST_BYTES = 1 << 18


class Tail:
    """Follows one file.

    One `read_lines` reads at most `look_bytes`, and at most `first_bytes` of the content from
    before the first call. If it is more than `lag_bytes` behind, it skips the rest
    (`skipped_bytes`). A link, anything but a regular file, and a file of another user than `owner`
    (None: any) is not read.
    """

    def __init__(
        self,
        path: Path,
        *,
        owner: int | None = None,
        look_bytes: int = LOOK_BYTES,
        first_bytes: int = FIRST_BYTES,
        lag_bytes: int = 2 * LOOK_BYTES,
    ) -> None:
        self.path = path
        self.skipped_bytes = 0
        self._owner = owner
        self._look_bytes = look_bytes
        self._first_bytes = first_bytes
        self._lag_bytes = lag_bytes
        self._descriptor: int | None = None
        self._at = 0
        self._partial = b""
        self._aligned = True  # the next byte starts a line

    def read_lines(self) -> list[bytes]:
        """Return the new complete lines; none if the file does not exist or is not accessible."""
        try:
            return self._read()
        except OSError:
            self.close()
            return []

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None

    def _read(self) -> list[bytes]:
        if self._descriptor is not None and self._is_replaced():
            self.close()
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        if size < self._at:  # truncated
            self._seek(0)
        if size - self._at > self._lag_bytes:
            self.skipped_bytes += size - self._look_bytes - self._at
            self._seek(size - self._look_bytes)
        content = os.pread(self._descriptor, self._look_bytes, self._at)
        self._at += len(content)
        *whole, self._partial = (self._partial + content).split(b"\n")
        if len(self._partial) > self._look_bytes:
            self._partial, self._aligned = b"", False
        if whole and not self._aligned:
            self._aligned = True
            whole = whole[1:]
        return whole

    def _open(self) -> None:
        self._descriptor = open_regular(self.path, owner=self._owner)
        size = os.fstat(self._descriptor).st_size
        self._seek(max(0, size - self._first_bytes))
        self._first_bytes = size + self._lag_bytes  # all of the file that replaces it is new

    def _seek(self, at: int) -> None:
        self._at, self._partial, self._aligned = at, b"", at == 0

    def _is_replaced(self) -> bool:
        assert self._descriptor is not None
        held = os.fstat(self._descriptor)
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino) and self._at >= held.st_size
