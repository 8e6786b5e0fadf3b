"""Log files of ranks: each rank appends to its own, and the agent limits their size."""

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
    """The log of one rank. The rank writes with O_APPEND, so the agent can truncate it safely."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self) -> str:
        """Return the last TAIL_LINES lines, at most TAIL_BYTES."""
        content = self._last(TAIL_BYTES).decode(errors="replace")
        return "\n".join(content.splitlines()[-TAIL_LINES:])

    def truncate(self) -> None:
        """Keep only the end of a file beyond the limit; a line written meanwhile may be lost."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_size <= LIMIT_BYTES:
                return
            end = self._last(KEPT_BYTES)
            os.truncate(self.path, 0)
            with open(self.path, "ab") as file:
                file.write(b"[paceline: the log was truncated here]\n" + end)

    def _last(self, count: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - count))
                return file.read()
        except OSError:
            return b""


def prune_logs(directory: Path) -> None:
    """Delete all but the newest log files."""
    with contextlib.suppress(OSError):
        paths = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in paths[:-FILES_KEPT]:
            old.unlink(missing_ok=True)
