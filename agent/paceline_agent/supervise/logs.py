"""Log files of ranks: each rank appends to its own, and the agent limits their size."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

TAIL_LINES = 50
TAIL_BYTES = 16 << 10
LIMIT_BYTES = 32 << 20
KEPT_BYTES = 1 << 20
FILES_KEPT = 64
# Lines of libtorch that fill the end of a log after a crash: the C++ frames of each error, and one
# line for each GPU thread whose assertion failed (each thread of a block, often thousands).
_CPP_FRAME = re.compile(r"frame #\d+: ")
_DEVICE_ASSERTION = re.compile(r".*: block: \[[\d,]+\], thread: \[[\d,]+\] (Assertion .*)")


class LogFile:
    """The log of one rank. The rank writes with O_APPEND, so the agent can truncate it safely."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self) -> str:
        """Return the last TAIL_LINES lines, at most TAIL_BYTES.

        C++ frames and repeated device assertions are left out: they push the error out of it.
        """
        content = self._last(KEPT_BYTES).decode(errors="replace")
        lines = [*_without_noise(content.splitlines())][-TAIL_LINES:]
        return "\n".join(lines)[-TAIL_BYTES:]

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


def _without_noise(lines: list[str]) -> Iterator[str]:
    asserted: set[str] = set()
    for line in lines:
        if _CPP_FRAME.match(line):
            continue
        failed = _DEVICE_ASSERTION.fullmatch(line)
        if failed is not None:
            if failed[1] in asserted:
                continue
            asserted.add(failed[1])
        yield line


def prune_logs(directory: Path) -> None:
    """Delete all but the newest log files."""
    with contextlib.suppress(OSError):
        paths = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in paths[:-FILES_KEPT]:
            old.unlink(missing_ok=True)
