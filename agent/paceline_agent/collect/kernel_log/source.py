"""Reads new messages of /dev/kmsg or of a file with kernel messages.

The device returns one record per read and does not block. Records that were overwritten before they
were read are reported by EPIPE and counted by the gap in the sequence numbers. A file may be
truncated or replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_READ_BYTES = 1 << 16  # a read into a buffer smaller than the record fails (EINVAL)
_CALL_BYTES_AT_MOST = 1 << 23  # some 0.1 s
_LINE_BYTES_AT_MOST = 1 << 16


class LogLine(NamedTuple):
    """A line, and how many lines before it were not relevant."""

    text: str
    skipped: int


class KernelLogFile:
    """A file or device with kernel messages.

    `drained`: the last call reached its end. `caught_up`: at least one call has reached it."""

    def __init__(self, path: Path, is_relevant: Callable[[bytes], bool]) -> None:
        self.path = path
        self._is_relevant = is_relevant
        self._skipped = 0
        self._has_begun = False
        self.caught_up = False
        self.drained = False
        self.overruns = 0
        self.is_stream = False  # a device, from which no line can be removed
        self._descriptor: int | None = None
        self._partial = b""
        self._resume: tuple[int, int, int] | None = None  # device, inode, offset

    def read_lines(self, lines_at_most: int) -> list[LogLine]:
        """Return new complete lines: all lines of a device.

        The first and the relevant lines of a file.

        Raises OSError if the log cannot be opened or read.
        """
        descriptor = self._opened()
        lines: list[LogLine] = []
        self.drained = False
        read_bytes = 0
        while len(lines) < lines_at_most and read_bytes < _CALL_BYTES_AT_MOST:
            try:
                content = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                content = b""
            except OSError as error:
                if error.errno != errno.EPIPE:
                    self._resume = self._place()
                    self.close()
                    raise
                self.overruns += 1
                continue
            if not content:
                self.caught_up = self.drained = True
                break
            read_bytes += len(content)
            lines += self._lines(content)
        return lines

    def last_line(self) -> list[LogLine]:
        """Return the text after the last line break, if any: the end of a truncated log."""
        rest, self._partial = self._partial, b""
        return [self._line(rest)] if rest else []

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None
        self._partial = b""

    def _opened(self) -> int:
        if self._descriptor is not None and not self.is_stream and self._replaced():
            self.close()
        if self._descriptor is None:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
            self.is_stream = not stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            self._resume_reading()
        return self._descriptor

    def _place(self) -> tuple[int, int, int] | None:
        """Return the position at which to continue once the file can be read again."""
        if self._descriptor is None or self.is_stream:
            return None
        with contextlib.suppress(OSError):
            held = os.fstat(self._descriptor)
            at = os.lseek(self._descriptor, 0, os.SEEK_CUR) - len(self._partial)
            return held.st_dev, held.st_ino, at
        return None

    def _resume_reading(self) -> None:
        assert self._descriptor is not None
        resume, self._resume = self._resume, None
        held = os.fstat(self._descriptor)
        if resume is not None and resume[:2] == (held.st_dev, held.st_ino):
            os.lseek(self._descriptor, resume[2], os.SEEK_SET)

    def _replaced(self) -> bool:
        assert self._descriptor is not None
        held = os.fstat(self._descriptor)
        try:
            now = os.stat(self.path)
        except OSError:
            return False  # the rest of the replaced file has not been read yet
        if (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino):
            at = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            return at >= held.st_size
        return now.st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def _lines(self, content: bytes) -> list[LogLine]:
        *whole, self._partial = (self._partial + content).split(b"\n")
        if len(self._partial) > _LINE_BYTES_AT_MOST:
            self._partial = b""
        if self.is_stream:
            return [self._line(line) for line in whole]
        is_relevant = self._is_relevant
        lines = []
        for line in whole:
            if is_relevant(line) or not self._has_begun:
                self._has_begun = True
                lines.append(self._line(line))
            elif line.strip():  # a blank line is no message
                self._skipped += 1
        return lines

    def _line(self, line: bytes) -> LogLine:
        skipped, self._skipped = self._skipped, 0
        return LogLine(line.decode(errors="replace"), skipped)
