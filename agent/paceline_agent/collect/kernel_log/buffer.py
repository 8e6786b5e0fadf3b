"""Reads new messages of the kernel by syslog(2), which needs CAP_SYSLOG and no device.

A container may be given that capability, but not the device: a mounted /dev/kmsg cannot be opened
unless the container is privileged. The call returns the end of the kernel's buffer as text. New is
what follows the last lines of the previous call; if these are gone, messages may have been lost.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from paceline_agent.collect.kernel_log.source import LogLine

_READ_ALL, _SIZE_BUFFER = 3, 10  # include/linux/syslog.h
_USUAL_BYTES = 1 << 14
_MOST_BYTES = 1 << 24
_TAIL_BYTES = 1 << 12  # the previous end; each line has its time, so it does not occur twice
_libc = ctypes.CDLL(None, use_errno=True)


def read_kernel_buffer(size_bytes: int) -> bytes:
    """Return the newest messages, at most so many bytes of them. Raises OSError."""
    buffer = ctypes.create_string_buffer(size_bytes)
    filled_bytes = _klogctl(_READ_ALL, buffer, size_bytes)
    return ctypes.string_at(buffer, filled_bytes)


def kernel_buffer_bytes() -> int:
    """Return the size of the kernel's buffer. Raises OSError."""
    return _klogctl(_SIZE_BUFFER, None, 0)


def _klogctl(action: int, buffer: ctypes.Array[ctypes.c_char] | None, size_bytes: int) -> int:
    result: int = _libc.klogctl(action, buffer, size_bytes)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class KernelLogBuffer:
    """The messages of the kernel's buffer; the same interface as `KernelLogFile`."""

    is_stream = True  # no line can be removed

    def __init__(
        self,
        read: Callable[[int], bytes] = read_kernel_buffer,
        capacity_bytes: Callable[[], int] = kernel_buffer_bytes,
    ) -> None:
        self.caught_up = False
        self.drained = False
        self._read = read
        self._capacity_bytes = capacity_bytes
        self._tail = b""
        self._pending: list[LogLine] = []

    def read_lines(self, lines_at_most: int) -> list[LogLine]:
        """Return new lines. Raises OSError if the buffer cannot be read."""
        if not self._pending:
            text = self._new_text().decode(errors="replace")
            self._pending = [LogLine(line, 0) for line in text.split("\n") if line]
        lines, self._pending = self._pending[:lines_at_most], self._pending[lines_at_most:]
        self.drained = not self._pending
        self.caught_up = self.caught_up or self.drained
        return lines

    def last_line(self) -> list[LogLine]:
        """Return the text after the last line break: the kernel returns whole messages only."""
        return []

    def close(self) -> None:
        """Release nothing: there is no open file."""

    def _new_text(self) -> bytes:
        content = self._read(_USUAL_BYTES)
        at = content.rfind(self._tail) if self._tail else -1
        if at < 0:
            # A line of text is longer than its record: the prefix with its time is added.
            content = self._read(min(2 * self._capacity_bytes(), _MOST_BYTES))
            at = content.rfind(self._tail) if self._tail else -1
        new = content if at < 0 else content[at + len(self._tail) :]
        self._tail = content[-_TAIL_BYTES:]
        return new
