"""The output of a rank: a file that the rank appends to and the agent keeps short."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TAIL_LINES = 50
TAIL_BYTES = 16 << 10
LIMIT_BYTES = 32 << 20
KEPT_BYTES = 1 << 20
FILES_KEPT = 64


class LogFile:
    """Its writer holds it open with O_APPEND, so cutting it short from outside is safe."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self) -> str:
        """The last lines, or what the limit leaves of them."""
        content = self._last(TAIL_BYTES).decode(errors="replace")
        return "\n".join(content.splitlines()[-TAIL_LINES:])

    def bound(self) -> None:
        """Past the limit keep the end only; a line written meanwhile may be lost."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size <= LIMIT_BYTES:
                return
            kept = self._last(KEPT_BYTES)
            os.truncate(self.path, 0)
            with open(self.path, "ab") as file:
                file.write(b"[paceline: the log was cut here]\n" + kept)

    def _last(self, count: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - count))
                return file.read()
        except OSError:
            return b""


def prune_logs(directory: Path) -> None:
    """Keep the newest files of ended ranks."""
    with contextlib.suppress(OSError):
        found = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in found[:-FILES_KEPT]:
            old.unlink(missing_ok=True)
